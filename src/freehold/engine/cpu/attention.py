"""Causal attention over paged KV: prefill and decode in one kernel.

A work item is one KV head of some members: up to QUERIES consecutive positions of one sequence, or one
position each of several sequences that begin with the same pages. Shared pages are read once for all
members (cascade attention; Ye et al. 2024, Juravsky et al. 2024), then each member's own pages.

Keys are visited in blocks of 64 that start at multiples of 64 of the position, with a running softmax
(Milakov and Gimelshein 2018; FlashAttention). Blocks and the order inside them depend on positions
alone, never on page size, chunk, batch or what is shared, so neither does the result.
"""

import numpy as np
from numba import njit, prange

from freehold.engine.cpu.simd import (
    add,
    exp,
    keep_first,
    load,
    max_lanes,
    maximum,
    mul,
    prefetch,
    splat,
    store,
    sub,
    sum_lanes,
)
from freehold.engine.cpu.tile import tile_rows

LANES = 16
TILES = 4  # of 16 keys in a block
KEYS = TILES * LANES
QUERIES = 16  # positions of one work item
LINE = 64  # bytes of a cache line


@njit(inline="always")
def _gather_tile(source, table, page_size, base, count, head, kv_heads, size, keys_in_lanes, out, at):
    """Pages smaller than a tile: collect the 16 positions from `base` into a contiguous tile."""
    for j in range(count):
        position = base + j
        slot = table[position // page_size] * page_size + position % page_size
        start = ((slot // LANES) * kv_heads + head) * size * LANES
        lane = slot % LANES
        for k in range(size):
            if keys_in_lanes:
                out[at + k * LANES + j] = source[start + k * LANES + lane]
            else:
                out[at + j * size + k] = source[start + lane * size + k]


@njit(inline="always")
def _fetch(array, at, count):
    """Ask for `count` elements from `at` ahead of their use: a page may be anywhere, and is not guessed."""
    step = LINE // array.itemsize
    for k in range(0, count, step):
        prefetch(array, at + k)


@njit(inline="always")
def _soften(scratch, scores, state, sums, valid, size):
    """Turn one row of scores into probabilities and rescale what was summed before.

    `state` is where the highest score and the sum of weights so far are. `valid` keys of the block are
    visible to this row: the rest get probability 0.
    """
    low = splat(np.float32(-np.inf))
    top = low
    for t in range(TILES):
        visible = load(scratch, scores + t * LANES)
        if valid < KEYS:
            visible = keep_first(visible, valid - t * LANES, low)
            store(scratch, scores + t * LANES, visible)
        top = maximum(top, visible)
    highest = scratch[state]
    new = max(highest, max_lanes(top))
    weight = splat(np.float32(0))
    for t in range(TILES):
        p = exp(sub(load(scratch, scores + t * LANES), splat(new)))
        store(scratch, scores + t * LANES, p)
        weight = add(weight, p)
    if new > highest:
        # All lanes of `shrink` are equal; its largest is the scalar.
        shrink = exp(splat(highest - new))
        scratch[state] = new
        scratch[state + 1] *= max_lanes(shrink)
        for k in range(0, size, LANES):
            store(scratch, sums + k, mul(shrink, load(scratch, sums + k)))
    scratch[state + 1] += sum_lanes(weight)


@njit(inline="always")
def _block(
    scratch, row, rows, total, keys, values, tiles_k, tiles_v, table, page_size, block, end, first, group,
    head, kv_heads, size,
):  # fmt: skip
    """One block of keys for `rows` rows from `row`, of `total` in the scratch: [queries, sums, scores, state].

    Row r sees `first + r // group + 1` positions.
    """
    queries, sums, state = row * size, (total + row) * size, total * (2 * size + KEYS) + 2 * row
    scores = 2 * total * size + row * KEYS
    is_small = page_size < LANES
    tiles = (min(KEYS, end - block) + LANES - 1) // LANES
    scratch[scores : scores + rows * KEYS] = np.float32(0)
    for t in range(tiles):
        base = block + t * LANES
        if is_small:
            count = min(LANES, end - base)
            at = t * LANES * size
            _gather_tile(keys, table, page_size, base, count, head, kv_heads, size, True, tiles_k, at)
            _gather_tile(values, table, page_size, base, count, head, kv_heads, size, False, tiles_v, at)
            tile_rows(scratch, queries, size, tiles_k, at, LANES, size, scratch, scores + t * LANES, KEYS, rows)
        else:
            slot = table[base // page_size] * page_size + base % page_size
            at = ((slot // LANES) * kv_heads + head) * size * LANES
            _fetch(values, at, LANES * size)
            tile_rows(scratch, queries, size, keys, at, LANES, size, scratch, scores + t * LANES, KEYS, rows)
    for r in range(rows):
        valid = first + r // group + 1 - block
        if valid > 0:
            _soften(scratch, scores + r * KEYS, state + 2 * r, sums + r * size, valid, size)
        else:
            scratch[scores + r * KEYS : scores + (r + 1) * KEYS] = np.float32(0)
    for t in range(tiles):
        base = block + t * LANES
        count = min(LANES, end - base)
        if is_small:
            at = t * LANES * size
            for k in range(0, size, LANES):
                tile_rows(
                    scratch, scores + t * LANES, KEYS, tiles_v, at + k, size, count, scratch, sums + k, size, rows
                )
        else:
            slot = table[base // page_size] * page_size + base % page_size
            at = ((slot // LANES) * kv_heads + head) * size * LANES
            if base + KEYS < end:
                coming = table[(base + KEYS) // page_size] * page_size + (base + KEYS) % page_size
                _fetch(keys, ((coming // LANES) * kv_heads + head) * size * LANES, LANES * size)
            for k in range(0, size, LANES):
                tile_rows(scratch, scores + t * LANES, KEYS, values, at + k, size, count, scratch, sums + k, size, rows)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def paged_attention(
    q, keys, values, tables, page_size, item_members, item_shared, rows, tokens, counts, positions,
    heads, kv_heads, size, scale, out,
):  # fmt: skip
    """q, out flat [tokens, heads, size]; keys, values flat, one layer's; tables int32 [rows, pages].

    Item i has members `item_members[i]` up to `item_members[i + 1]`, which share their first
    `item_shared[i]` positions, a multiple of 64. Member m: `counts[m]` queries, the first of them token
    `tokens[m]` of q at position `positions[m]` of the sequence in table row `rows[m]`.
    """
    group = heads // kv_heads
    items = len(item_members) - 1
    for work in prange(items * kv_heads):
        # One head after the other: its KV, read by item after item, may fit a core's own cache.
        head, item = work // items, work % items
        member, stop, shared = item_members[item], item_members[item + 1], item_shared[item]
        total = group * np.sum(counts[member:stop])
        scratch = np.zeros(total * (2 * size + KEYS + 2), np.float32)
        tiles_k = np.zeros(KEYS * size if page_size < LANES else 0, np.float32)
        tiles_v = np.zeros(KEYS * size if page_size < LANES else 0, np.float32)
        state = total * (2 * size + KEYS)
        row = 0
        for m in range(member, stop):
            for r in range(counts[m] * group):
                at = ((tokens[m] + r // group) * heads + head * group + r % group) * size
                for k in range(size):
                    scratch[row * size + k] = q[at + k] * scale
                scratch[state + 2 * row] = np.float32(-np.inf)
                row += 1
        for block in range(0, shared, KEYS):
            _block(
                scratch, 0, total, total, keys, values, tiles_k, tiles_v, tables[rows[member]], page_size, block,
                shared, shared, group, head, kv_heads, size,
            )  # fmt: skip
        row = 0
        for m in range(member, stop):
            count, end = counts[m] * group, positions[m] + counts[m]
            for block in range(shared, end, KEYS):
                _block(
                    scratch, row, count, total, keys, values, tiles_k, tiles_v, tables[rows[m]], page_size, block,
                    end, positions[m], group, head, kv_heads, size,
                )  # fmt: skip
            for r in range(count):
                at = ((tokens[m] + r // group) * heads + head * group + r % group) * size
                weight = scratch[state + 2 * (row + r) + 1]
                for k in range(size):
                    out[at + k] = scratch[(total + row + r) * size + k] / weight
            row += count
