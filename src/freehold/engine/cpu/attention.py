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

from freehold.engine.cpu.pointwise import ROWS_PARALLEL, rotate_and_write
from freehold.engine.cpu.simd import (
    add,
    element,
    exp,
    keep_first,
    load,
    max_lanes,
    maximum,
    mul,
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
                out[at + k * LANES + j] = element(source, start + k * LANES + lane)
            else:
                out[at + j * size + k] = element(source, start + lane * size + k)


@njit(inline="always")
def _scale_tile(scratch, at, rows, scales, table, page_size, base, count, head, kv_heads):
    """Multiply `rows` rows of 16 scores, the first of them at `at`, by the scales of the positions from `base`."""
    factors = np.zeros(LANES, np.float32)
    for j in range(count):
        position = base + j
        slot = table[position // page_size] * page_size + position % page_size
        factors[j] = scales[((slot // LANES) * kv_heads + head) * LANES + slot % LANES]
    for r in range(rows):
        store(scratch, at + r * KEYS, mul(load(factors, 0), load(scratch, at + r * KEYS)))


@njit(inline="always")
def _online_softmax(scratch, scores, state, sums, valid, size):
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
    scratch, row, rows, total, keys, values, key_scales, value_scales, tiles_k, tiles_v, table, page_size,
    block, end, first, group, head, kv_heads, size,
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
            tile_rows(scratch, queries, size, keys, at, LANES, size, scratch, scores + t * LANES, KEYS, rows)
        if len(key_scales):
            count = min(LANES, end - base)
            _scale_tile(scratch, scores + t * LANES, rows, key_scales, table, page_size, base, count, head, kv_heads)
    for r in range(rows):
        valid = first + r // group + 1 - block
        if valid > 0:
            _online_softmax(scratch, scores + r * KEYS, state + 2 * r, sums + r * size, valid, size)
        else:
            scratch[scores + r * KEYS : scores + (r + 1) * KEYS] = np.float32(0)
    for t in range(tiles):
        base = block + t * LANES
        count = min(LANES, end - base)
        if len(value_scales):
            _scale_tile(scratch, scores + t * LANES, rows, value_scales, table, page_size, base, count, head, kv_heads)
        if is_small:
            at = t * LANES * size
            for k in range(0, size, LANES):
                tile_rows(
                    scratch, scores + t * LANES, KEYS, tiles_v, at + k, size, count, scratch, sums + k, size, rows
                )
        else:
            slot = table[base // page_size] * page_size + base % page_size
            at = ((slot // LANES) * kv_heads + head) * size * LANES
            for k in range(0, size, LANES):
                tile_rows(scratch, scores + t * LANES, KEYS, values, at + k, size, count, scratch, sums + k, size, rows)


@njit(nogil=True, error_model="numpy")
def _attend_item(
    q, keys, values, key_scales, value_scales, tables, page_size, member, stop, shared, rows, tokens, counts,
    positions, head, heads, kv_heads, size, out,
):  # fmt: skip
    """Members `member` up to `stop`, with one KV head."""
    group, scale = heads // kv_heads, np.float32(1) / np.sqrt(np.float32(size))
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
    row = 0
    for m in range(member - 1, stop):  # first what all share, through the table of the first
        is_shared = m < member
        table = tables[rows[max(m, member)]]
        count = total if is_shared else counts[m] * group
        start, end = (0, shared) if is_shared else (shared, positions[m] + counts[m])
        for block in range(start, end, KEYS):
            _block(
                scratch, row, count, total, keys, values, key_scales, value_scales, tiles_k, tiles_v, table, page_size,
                block, end, shared if is_shared else positions[m], group, head, kv_heads, size,
            )  # fmt: skip
        if not is_shared:
            for r in range(count):
                at = ((tokens[m] + r // group) * heads + head * group + r % group) * size
                weight = scratch[state + 2 * (row + r) + 1]
                for k in range(size):
                    out[at + k] = scratch[(total + row + r) * size + k] / weight
            row += count


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def attend(
    qkv, token_positions, slots, cos, sin, q_norm, k_norm, epsilon, keys, values, key_scales, value_scales,
    tables, page_size, item_members, item_shared, rows, tokens, counts, positions, heads, kv_heads, size, out,
):  # fmt: skip
    """Rotate queries and keys, write keys and values to their slots, attend: out flat [tokens, heads, size].

    keys, values and their scales flat, one layer's; tables int32 [rows, pages]. Item i has members
    `item_members[i]` up to `item_members[i + 1]`, which share their first `item_shared[i]` positions, a
    multiple of 64. Member m: `counts[m]` queries, the first of them token `tokens[m]` at position
    `positions[m]` of the sequence in table row `rows[m]`.
    """
    q = np.empty_like(out)
    if len(slots) < ROWS_PARALLEL:
        for token in range(len(slots)):
            rotate_and_write(
                token, qkv, token_positions[token], slots[token], cos, sin, heads, kv_heads, size, q_norm, k_norm,
                epsilon, q, keys, values, key_scales, value_scales,
            )  # fmt: skip
    else:
        for token in prange(len(slots)):
            rotate_and_write(
                token, qkv, token_positions[token], slots[token], cos, sin, heads, kv_heads, size, q_norm, k_norm,
                epsilon, q, keys, values, key_scales, value_scales,
            )  # fmt: skip
    items = len(item_members) - 1
    for work in prange(items * kv_heads):
        # One head after the other: its KV, read by item after item, may fit a core's own cache.
        head, item = work // items, work % items
        _attend_item(
            q, keys, values, key_scales, value_scales, tables, page_size, item_members[item], item_members[item + 1],
            item_shared[item], rows, tokens, counts, positions, head, heads, kv_heads, size, out,
        )  # fmt: skip
