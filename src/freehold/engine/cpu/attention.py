"""Causal attention over paged KV: prefill and decode in one kernel.

A work item is one KV head of some members: up to QUERIES consecutive positions of one sequence, or one
position each of several sequences that begin with the same pages. Shared pages are read once for all
members (cascade attention; Ye et al. 2024, Juravsky et al. 2024), then each member's own pages.

Keys are visited in blocks of 64 that start at multiples of 64 of the position, with a running softmax
(Milakov and Gimelshein 2018; FlashAttention). Blocks and the order inside them depend on positions
alone, never on page size, chunk, batch or what is shared, so neither does the result.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from freehold.engine.cpu.pointwise import ROWS_PARALLEL, Heads, LayerKV, Rotation, rotate_and_write
from freehold.engine.cpu.simd import (
    add,
    element,
    exp,
    keep_first,
    load,
    max_lanes,
    maximum,
    mul,
    reciprocal,
    splat,
    store,
    sub,
    sum_lanes,
)
from freehold.engine.cpu.tile import Rows, tile_rows

LANES = 16
TILES = 4  # of 16 keys in a block
KEYS = TILES * LANES
QUERIES = 16  # positions of one work item


class Pages(NamedTuple):
    """Where a sequence's KV is: `table` int32 [pages]."""

    table: Any
    size: int


class Members(NamedTuple):
    """Member m of a work item: `counts[m]` queries, the first of them token `tokens[m]` at position `positions[m]` of
    the sequence in table row `rows[m]`. All int64 [n]."""

    rows: Any
    tokens: Any
    counts: Any
    positions: Any


class Item(NamedTuple):
    """Members `first` up to `stop`, which share their first `shared` positions."""

    first: int
    stop: int
    shared: int


class Scratch(NamedTuple):
    """What an item knows of each of its rows, which are its queries: [rows, size] the scaled query and the sum of
    values so far, [rows, KEYS] the scores of a block, [rows] the highest score and the sum of weights so far. Tiles of
    keys and values, where pages are smaller than a tile."""

    queries: Any
    sums: Any
    scores: Any
    highest: Any
    weights: Any
    tiles_k: Any
    tiles_v: Any


class Scoring(NamedTuple):
    """How a score is made of a query and a key: `scale` times their product, then `cap * tanh(score / cap)` unless the
    cap is 0. `sinks` [query heads], empty for none, are scores that take attention away from all keys."""

    scale: Any
    cap: Any
    sinks: Any


class Block(NamedTuple):
    """A block of keys from position `start`, of which those before `end` exist, for rows `row` up to `row + rows`. Row
    `row + r` sees the positions below `first + r // group + 1`; if `lookback` is not 0, only so many before its own."""

    start: int
    end: int
    row: int
    rows: int
    first: int
    group: int
    lookback: int


@njit(inline="always")
def _slot(pages, position):
    return pages.table[position // pages.size] * pages.size + position % pages.size


@njit(inline="always")
def _gather_keys(keys, pages, base, count, head, heads, out):
    """Pages smaller than a tile: collect the 16 keys from position `base` into a contiguous tile [size, 16]."""
    size = heads.size
    for j in range(count):
        slot = _slot(pages, base + j)
        start, lane = ((slot // LANES) * heads.kv + head) * size * LANES, slot % LANES
        for k in range(size):
            out[k * LANES + j] = element(keys, start + k * LANES + lane)


@njit(inline="always")
def _gather_values(kv, pages, base, count, head, heads, out):
    """The 16 values from position `base` in a contiguous tile [16, value size]. Those of latents lie in lanes."""
    size = heads.value_size
    for j in range(count):
        slot = _slot(pages, base + j)
        row, lane = (slot // LANES) * heads.kv + head, slot % LANES
        for k in range(size):
            if heads.is_latent:
                out[j * size + k] = element(kv.keys, row * heads.size * LANES + k * LANES + lane)
            else:
                out[j * size + k] = element(kv.values, row * size * LANES + lane * size + k)


@njit(inline="always")
def _scale_tile(scores, rows, scales, pages, base, count, head, heads):
    """Multiply `rows` rows of 16 scores by the scales of the positions from `base`."""
    factors = np.zeros(LANES, np.float32)
    for j in range(count):
        slot = _slot(pages, base + j)
        factors[j] = scales[((slot // LANES) * heads.kv + head) * LANES + slot % LANES]
    for r in range(rows):
        store(scores, r * KEYS, mul(load(factors, 0), load(scores, r * KEYS)))


@njit(inline="always")
def _online_softmax(scratch, row, hidden, valid, size):
    """Turn one row of scores into probabilities and rescale what was summed before. Keys `hidden` up to `valid` of the
    block are visible to this row: the rest get probability 0."""
    scores, at = scratch.scores, row * KEYS
    low = splat(np.float32(-np.inf))
    if hidden > 0:
        scores[at : at + hidden] = np.float32(-np.inf)
    top = low
    for t in range(TILES):
        visible = load(scores, at + t * LANES)
        if valid < KEYS:
            visible = keep_first(visible, valid - t * LANES, low)
            store(scores, at + t * LANES, visible)
        top = maximum(top, visible)
    highest = scratch.highest[row]
    new = max(highest, max_lanes(top))
    weight = splat(np.float32(0))
    for t in range(TILES):
        p = exp(sub(load(scores, at + t * LANES), splat(new)))
        store(scores, at + t * LANES, p)
        weight = add(weight, p)
    if new > highest:
        # All lanes of `shrink` are equal; its largest is the scalar.
        shrink = exp(splat(highest - new))
        scratch.highest[row] = new
        scratch.weights[row] *= max_lanes(shrink)
        for k in range(row * size, (row + 1) * size, LANES):
            store(scratch.sums, k, mul(shrink, load(scratch.sums, k)))
    scratch.weights[row] += sum_lanes(weight)


@njit(inline="always")
def _score(scratch, kv, pages, block, head, heads):
    """Queries times keys."""
    size, row, rows = heads.size, block.row, block.rows
    queries = Rows(scratch.queries, row * size, size)
    scratch.scores[row * KEYS : (row + rows) * KEYS] = np.float32(0)
    for base in range(block.start, min(block.end, block.start + KEYS), LANES):
        count, at = min(LANES, block.end - base), row * KEYS + base - block.start
        if pages.size < LANES:
            _gather_keys(kv.keys, pages, base, count, head, heads, scratch.tiles_k)
            tile_rows(queries, Rows(scratch.tiles_k, 0, LANES), size, Rows(scratch.scores, at, KEYS), rows)
        else:
            tile = ((_slot(pages, base) // LANES) * heads.kv + head) * size * LANES
            tile_rows(queries, Rows(kv.keys, tile, LANES), size, Rows(scratch.scores, at, KEYS), rows)
        if len(kv.key_scales):
            _scale_tile(scratch.scores[at:], rows, kv.key_scales, pages, base, count, head, heads)


@njit(inline="always")
def _cap(scratch, block, cap):
    """score = cap * tanh(score / cap), as cap - 2 cap / (exp(2 score / cap) + 1)."""
    slope, top, twice = splat(np.float32(2) / cap), splat(cap), splat(np.float32(2) * cap)
    one = splat(np.float32(1))
    for at in range(block.row * KEYS, (block.row + block.rows) * KEYS, LANES):
        grown = add(exp(mul(slope, load(scratch.scores, at))), one)
        store(scratch.scores, at, sub(top, mul(twice, reciprocal(grown))))


@njit(inline="always")
def _add_values(scratch, kv, pages, block, head, heads):
    """Probabilities times values."""
    size, row, rows = heads.value_size, block.row, block.rows
    value_scales = kv.key_scales if heads.is_latent else kv.value_scales
    for base in range(block.start, min(block.end, block.start + KEYS), LANES):
        count, at = min(LANES, block.end - base), row * KEYS + base - block.start
        scores, to = Rows(scratch.scores, at, KEYS), row * size
        if len(value_scales):
            _scale_tile(scratch.scores[at:], rows, value_scales, pages, base, count, head, heads)
        if pages.size < LANES or heads.is_latent:
            _gather_values(kv, pages, base, count, head, heads, scratch.tiles_v)
            for k in range(0, size, LANES):
                tile_rows(scores, Rows(scratch.tiles_v, k, size), count, Rows(scratch.sums, to + k, size), rows)
        else:
            tile = ((_slot(pages, base) // LANES) * heads.kv + head) * size * LANES
            for k in range(0, size, LANES):
                tile_rows(scores, Rows(kv.values, tile + k, size), count, Rows(scratch.sums, to + k, size), rows)


@njit(inline="always")
def _attend_block(scratch, kv, pages, block, head, heads, cap):
    _score(scratch, kv, pages, block, head, heads)
    if cap > 0:
        _cap(scratch, block, cap)
    for r in range(block.rows):
        row, own = block.row + r, block.first + r // block.group - block.start
        hidden = own - block.lookback if block.lookback else 0
        if own >= 0 and hidden < KEYS:
            _online_softmax(scratch, row, hidden, own + 1, heads.value_size)
        else:
            scratch.scores[row * KEYS : (row + 1) * KEYS] = np.float32(0)
    _add_values(scratch, kv, pages, block, head, heads)


@njit(inline="always")
def _make_scratch(rows, heads, is_gathered):
    size, value_size = heads.size, heads.value_size
    room = np.zeros(rows * (size + value_size + KEYS + 2), np.float32)
    sums, scores = rows * size, rows * (size + value_size)
    state = scores + rows * KEYS
    room[state : state + rows] = np.float32(-np.inf)
    tile_k, tile_v = LANES * size if is_gathered else 0, LANES * value_size if is_gathered or heads.is_latent else 0
    return Scratch(
        room[:sums], room[sums:scores], room[scores:state], room[state : state + rows],
        room[state + rows :], np.zeros(tile_k, np.float32), np.zeros(tile_v, np.float32),
    )  # fmt: skip


@njit(inline="always")
def _take_queries(q, scoring, members, item, head, heads, scratch):
    """Scaled queries of all rows. A sink is a key that has been seen already, and whose value is 0."""
    size, group, row = heads.size, heads.queries // heads.kv, 0
    for m in range(item.first, item.stop):
        for r in range(members.counts[m] * group):
            query_head = head * group + r % group
            at = ((members.tokens[m] + r // group) * heads.queries + query_head) * size
            for k in range(size):
                scratch.queries[row * size + k] = q[at + k] * scoring.scale
            if len(scoring.sinks):
                scratch.highest[row] = scoring.sinks[query_head]
                scratch.weights[row] = np.float32(1)
            row += 1


@njit(nogil=True, error_model="numpy")
def _attend_item(q, kv, tables, page_size, lookback, scoring, members, item, head, heads, out):
    """One item, with one head of keys and values. Blocks that no row looks back on are not read."""
    size, group, shared = heads.value_size, heads.queries // heads.kv, item.shared
    total = group * np.sum(members.counts[item.first : item.stop])
    scratch = _make_scratch(total, heads, page_size < LANES)
    _take_queries(q, scoring, members, item, head, heads, scratch)
    row = 0
    for m in range(item.first - 1, item.stop):  # first what all share, through the table of the first
        is_shared = m < item.first
        pages = Pages(tables[members.rows[max(m, item.first)]], page_size)
        rows = total if is_shared else members.counts[m] * group
        start, end = (0, shared) if is_shared else (shared, members.positions[m] + members.counts[m])
        first = shared if is_shared else members.positions[m]
        if lookback and first > lookback:
            start = max(start, (first - lookback) // KEYS * KEYS)
        for at in range(start, end, KEYS):
            block = Block(at, end, row, rows, first, group, lookback)
            _attend_block(scratch, kv, pages, block, head, heads, scoring.cap)
        if not is_shared:
            for r in range(rows):
                at = ((members.tokens[m] + r // group) * heads.queries + head * group + r % group) * size
                for k in range(size):
                    out[at + k] = scratch.sums[(row + r) * size + k] / scratch.weights[row + r]
            row += rows


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def attend(
    qkv, token_positions, slots, tables, item_members, item_shared, rows, tokens, counts, positions, out,
    cos, sin, pairs, rotary_start, q_norm, k_norm, epsilon, keys, values, key_scales, value_scales,
    page_size, lookback, scale, cap, sinks, query_heads, kv_heads, size, value_size, is_latent,
):  # fmt: skip
    """Rotate queries and keys, write keys and values to their slots, attend: out flat [tokens, heads, value size].

    Arguments of an entry point are plain: records are slow to pass from Python, so they are made here. Item i has
    members `item_members[i]` up to `item_members[i + 1]`, which share their first `item_shared[i]` positions, a
    multiple of 64, and 0 where `lookback` is not; tables int32 [rows, pages].
    """
    q = np.empty(len(slots) * query_heads * size, np.float32)
    if len(slots) < ROWS_PARALLEL:
        for token in range(len(slots)):
            kv = LayerKV(keys, values, key_scales, value_scales)
            heads = Heads(query_heads, kv_heads, size, value_size, is_latent)
            rotation = Rotation(cos, sin, pairs, rotary_start, q_norm, k_norm, epsilon)
            rotate_and_write(token, qkv, token_positions[token], slots[token], rotation, heads, kv, q)
    else:
        for token in prange(len(slots)):
            kv = LayerKV(keys, values, key_scales, value_scales)
            heads = Heads(query_heads, kv_heads, size, value_size, is_latent)
            rotation = Rotation(cos, sin, pairs, rotary_start, q_norm, k_norm, epsilon)
            rotate_and_write(token, qkv, token_positions[token], slots[token], rotation, heads, kv, q)
    items = len(item_members) - 1
    for work in prange(items * kv_heads):
        # One head after the other: its KV, read by item after item, may fit a core's own cache.
        head, number = work // items, work % items
        kv = LayerKV(keys, values, key_scales, value_scales)
        heads = Heads(query_heads, kv_heads, size, value_size, is_latent)
        item = Item(item_members[number], item_members[number + 1], item_shared[number])
        members, scoring = Members(rows, tokens, counts, positions), Scoring(scale, cap, sinks)
        _attend_item(q, kv, tables, page_size, lookback, scoring, members, item, head, heads, out)
