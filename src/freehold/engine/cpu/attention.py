"""Causal attention over paged KV: prefill and decode in one kernel.

A work item is up to QUERIES consecutive positions of one sequence with one KV head. Keys are visited in
blocks of 64 that start at multiples of 64 of the position, with a running softmax (Milakov and
Gimelshein 2018; FlashAttention). Blocks and the order inside them depend on positions alone, never on
page size, chunk or batch, so neither does the result.
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
    splat,
    store,
    sub,
    sum_lanes,
)
from freehold.engine.cpu.tile import tile_rows

LANES = 16
TILES = 4  # of 16 keys in a block
KEYS = TILES * LANES
QUERIES = 8  # positions of one work item


@njit(inline="always")
def _gather_tile(keys, values, table, page_size, base, count, head, kv_heads, size, key_tile, value_tile, at):
    """Pages smaller than a tile: collect the 16 positions from `base` into contiguous tiles."""
    for j in range(count):
        position = base + j
        slot = table[position // page_size] * page_size + position % page_size
        start = ((slot // LANES) * kv_heads + head) * size * LANES
        lane = slot % LANES
        for k in range(size):
            key_tile[at + k * LANES + j] = keys[start + k * LANES + lane]
            value_tile[at + j * size + k] = values[start + lane * size + k]


@njit(inline="always")
def _soften(scores, row, valid, highest, total, sums, size):
    """Turn one row of scores into probabilities and rescale what was summed before.

    `valid` keys of the block are visible to this row: the rest get probability 0.
    """
    low = splat(np.float32(-np.inf))
    top = low
    for t in range(TILES):
        visible = keep_first(load(scores, row * KEYS + t * LANES), valid - t * LANES, low)
        store(scores, row * KEYS + t * LANES, visible)
        top = maximum(top, visible)
    new = max(highest[row], max_lanes(top))
    shrink = exp(splat(highest[row] - new))
    weight = splat(np.float32(0))
    for t in range(TILES):
        p = exp(sub(load(scores, row * KEYS + t * LANES), splat(new)))
        store(scores, row * KEYS + t * LANES, p)
        weight = add(weight, p)
    highest[row] = new
    # All lanes of `shrink` are equal; its largest is the scalar.
    total[row] = total[row] * max_lanes(shrink) + sum_lanes(weight)
    for k in range(0, size, LANES):
        store(sums, row * size + k, mul(shrink, load(sums, row * size + k)))


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def paged_attention(
    q, keys, values, tables, page_size, item_rows, item_tokens, item_counts, item_positions,
    heads, kv_heads, size, scale, out,
):  # fmt: skip
    """q, out flat [tokens, heads, size]; keys, values flat, one layer's; tables int32 [rows, pages].

    Item i: `item_counts[i]` queries, the first of them token `item_tokens[i]` of q at position
    `item_positions[i]` of the sequence in table row `item_rows[i]`.
    """
    group = heads // kv_heads
    for work in prange(len(item_rows) * kv_heads):
        item, head = work // kv_heads, work % kv_heads
        table = tables[item_rows[item]]
        token, first = item_tokens[item], item_positions[item]
        rows = item_counts[item] * group
        end = first + item_counts[item]
        query = np.empty(rows * size, np.float32)
        sums = np.zeros(rows * size, np.float32)
        highest = np.full(rows, np.float32(-np.inf), np.float32)
        total = np.zeros(rows, np.float32)
        scores = np.empty(rows * KEYS, np.float32)
        key_tile = np.zeros(KEYS * size if page_size < LANES else 0, np.float32)
        value_tile = np.zeros(KEYS * size if page_size < LANES else 0, np.float32)
        key_at = np.empty(TILES, np.int64)
        for r in range(rows):
            at = ((token + r // group) * heads + head * group + r % group) * size
            for k in range(size):
                query[r * size + k] = q[at + k] * scale
        for block in range(0, end, KEYS):
            tiles = (min(KEYS, end - block) + LANES - 1) // LANES
            scores[:] = np.float32(0)
            for t in range(tiles):
                base = block + t * LANES
                if page_size < LANES:
                    key_at[t] = t * LANES * size
                    count = min(LANES, end - base)
                    _gather_tile(
                        keys, values, table, page_size, base, count, head, kv_heads, size,
                        key_tile, value_tile, key_at[t],
                    )  # fmt: skip
                    tile_rows(query, 0, size, key_tile, key_at[t], LANES, size, scores, t * LANES, KEYS, rows)
                else:
                    slot = table[base // page_size] * page_size + base % page_size
                    key_at[t] = ((slot // LANES) * kv_heads + head) * size * LANES
                    tile_rows(query, 0, size, keys, key_at[t], LANES, size, scores, t * LANES, KEYS, rows)
            for r in range(rows):
                valid = first + r // group + 1 - block
                if valid > 0:
                    _soften(scores, r, valid, highest, total, sums, size)
                else:
                    scores[r * KEYS : (r + 1) * KEYS] = np.float32(0)
            for t in range(tiles):
                count = min(LANES, end - block - t * LANES)
                for k in range(0, size, LANES):
                    if page_size < LANES:
                        tile_rows(
                            scores, t * LANES, KEYS, value_tile, key_at[t] + k, size, count,
                            sums, k, size, rows,
                        )  # fmt: skip
                    else:
                        tile_rows(scores, t * LANES, KEYS, values, key_at[t] + k, size, count, sums, k, size, rows)
        for r in range(rows):
            at = ((token + r // group) * heads + head * group + r % group) * size
            for k in range(size):
                out[at + k] = sums[r * size + k] / total[r]
