"""Causal attention over paged KV: prefill and decode in one kernel.

A work item (`items.py`) is one KV head of some members: up to QUERIES consecutive positions of one sequence, or one
position each of several sequences that begin with the same pages. Shared pages are read once for all
members (cascade attention; Ye et al. 2024, Juravsky et al. 2024), then each member's own pages.

Keys are visited in blocks of 64 that start at multiples of 64 of the position, with a running softmax
(FlashAttention). It begins anew every SEGMENT positions, and segments are merged in order, so that several
threads can work for one row (Flash-Decoding; Dao et al. 2023): long contexts need that where there are few
heads of keys. Blocks, segments and the order inside them depend on positions alone, never on page size,
chunk, batch, threads or what is shared, so neither does the result.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from freehold.engine.cpu.attention_amx import (
    TILE,
    can_multiply,
    pair_keys,
    pair_values,
    score_rows,
    split,
    weigh_rows,
)
from freehold.engine.cpu.attention_amx import (
    begin as begin_products,
)
from freehold.engine.cpu.attention_amx import (
    end as end_products,
)
from freehold.engine.cpu.items import SEGMENT, WHOLE, Item, Members
from freehold.engine.cpu.pointwise import ROWS_PARALLEL, Heads, LayerKV, Rotation, rotate_and_write
from freehold.engine.cpu.simd import add, element, exp, load, mul, reciprocal, splat, store, sub
from freehold.engine.cpu.softmax import KEYS, LANES, Softmax, empty_softmax, merge_segment, take_block
from freehold.engine.cpu.tile import WIDE_ROWS, Rows, tile_rows, two_panels, wide_rows


class Pages(NamedTuple):
    """Where a sequence's KV is: `table` int32 [pages]."""

    table: Any
    size: int


class Scoring(NamedTuple):
    """How a score is made of a query and a key: `scale` times their product, then `cap * tanh(score / cap)` unless the
    cap is 0. `sinks` [query heads], empty for none, are scores that take attention away from all keys."""

    scale: Any
    cap: Any
    sinks: Any


class Layer(NamedTuple):
    """The cache of a layer, and how it is looked at. `lookback` 0 is all. `isa` is that of products of bfloat16."""

    kv: Any
    tables: Any
    page_size: int
    lookback: int
    scoring: Any
    heads: Any
    isa: Any


class Scratch(NamedTuple):
    """What is known of each row, which is one of an item's queries: [rows, size] the scaled query, [rows, KEYS] the
    scores of a block. Tiles of keys and values, where pages are smaller than a tile. For products of bfloat16
    (`attention_amx`) both halves of queries, scores of 16 rows only and both halves of their probabilities, and keys
    and values of a block in pairs; then queries are followed by zeros that fill a register."""

    queries: Any
    scores: Any
    tiles_k: Any
    tiles_v: Any
    split_queries: Any
    split_scores: Any
    paired_keys: Any
    paired_values: Any


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
def _score(scratch, kv, pages, block, head, heads):
    """Queries times keys."""
    size, row, rows = heads.size, block.row, block.rows
    queries = Rows(scratch.queries, row * size, size)
    scratch.scores[row * KEYS : (row + rows) * KEYS] = np.float32(0)
    if rows <= WIDE_ROWS and pages.size >= LANES and block.end >= block.start + KEYS:
        for base in range(block.start, block.start + KEYS, 2 * LANES):
            one = ((_slot(pages, base) // LANES) * heads.kv + head) * size * LANES
            two = ((_slot(pages, base + LANES) // LANES) * heads.kv + head) * size * LANES
            at = row * KEYS + base - block.start
            scores = Rows(scratch.scores, at, KEYS)
            two_panels(queries, Rows(kv.keys, one, LANES), Rows(kv.keys, two, LANES), size, scores, rows)
            if len(kv.key_scales):
                _scale_tile(scratch.scores[at:], rows, kv.key_scales, pages, base, LANES, head, heads)
                _scale_tile(scratch.scores[at + LANES :], rows, kv.key_scales, pages, base + LANES, LANES, head, heads)
        return
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
def _pair_block(scratch, layer, pages, block, head):
    """Keys and values of a block in pairs. Where there is no key, values are 0."""
    kv, heads, isa = layer.kv, layer.heads, layer.isa
    for number in range(KEYS // LANES):
        base = block.start + number * LANES
        count = min(LANES, block.end - base)
        if pages.size >= LANES or count <= 0:
            tile = ((_slot(pages, base) // LANES) * heads.kv + head) * LANES if count > 0 else 0
            size, room = heads.value_size, scratch.paired_values
            pair_values(isa, kv.values, tile * size, size, room, number, count)
            if count > 0:
                pair_keys(isa, kv.keys, tile * heads.size, heads.size, scratch.paired_keys, number)
        else:
            _gather_pairs(scratch, kv, pages, base, count, number, head, heads)


@njit(inline="always")
def _gather_pairs(scratch, kv, pages, base, count, number, head, heads):
    """The same for a tile that lies in several pages."""
    size, value_size = heads.size, heads.value_size
    for j in range(LANES):
        is_there = j < count
        slot = _slot(pages, base + j) if is_there else 0
        row, lane = (slot // LANES) * heads.kv + head, slot % LANES
        for k in range(size if is_there else 0):
            at = ((number * size // 2 + k // 2) * LANES + j) * 2 + k % 2
            scratch.paired_keys[at] = kv.keys[(row * size + k) * LANES + lane]
        for k in range(value_size):
            at = ((k // LANES * KEYS + number * LANES + j // 2 * 2) * LANES + k % LANES * 2) + j % 2
            scratch.paired_values[at] = kv.values[(row * LANES + lane) * value_size + k] if is_there else 0


@njit(inline="always")
def _cap(scores, begin, end, cap):
    """score = cap * tanh(score / cap), as cap - 2 cap / (exp(2 score / cap) + 1)."""
    slope, top, twice = splat(np.float32(2) / cap), splat(cap), splat(np.float32(2) * cap)
    one = splat(np.float32(1))
    for at in range(begin, end, LANES):
        grown = add(exp(mul(slope, load(scores, at))), one)
        store(scores, at, sub(top, mul(twice, reciprocal(grown))))


@njit(inline="always")
def _add_values(scratch, softmax, kv, pages, block, head, heads):
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
                tile_rows(scores, Rows(scratch.tiles_v, k, size), count, Rows(softmax.sums, to + k, size), rows)
        else:
            tile = ((_slot(pages, base) // LANES) * heads.kv + head) * size * LANES
            if rows <= WIDE_ROWS and size % (2 * LANES) == 0:
                for k in range(0, size, 2 * LANES):
                    wide_rows(scores, Rows(kv.values, tile + k, size), count, Rows(softmax.sums, to + k, size), rows)
            else:
                for k in range(0, size, LANES):
                    tile_rows(scores, Rows(kv.values, tile + k, size), count, Rows(softmax.sums, to + k, size), rows)


@njit(inline="always")
def _weights(scores, at, softmax, block, first, rows, layer):
    """Scores of rows `first` up to `first + rows`, which begin at `at`, become probabilities."""
    if layer.scoring.cap > 0:
        _cap(scores, at, at + rows * KEYS, layer.scoring.cap)
    for row in range(first, first + rows):
        own = block.first + (row - block.row) // block.group - block.start
        hidden = own - block.lookback if block.lookback else 0
        if own >= 0 and hidden < KEYS:
            take_block(softmax, row, scores, at, hidden, own + 1, layer.heads.value_size)
        else:
            scores[at : at + KEYS] = np.float32(0)
        at += KEYS


@njit(inline="always")
def _attend_block(scratch, softmax, layer, pages, block, head):
    kv, heads, scores = layer.kv, layer.heads, scratch.scores
    if not len(scratch.split_queries):
        _score(scratch, kv, pages, block, head, heads)
        _weights(scores, block.row * KEYS, softmax, block, block.row, block.rows, layer)
        _add_values(scratch, softmax, kv, pages, block, head, heads)
        return
    _pair_block(scratch, layer, pages, block, head)
    for row in range(block.row, block.row + block.rows, TILE):  # of which all stays in L1
        rows = min(TILE, block.row + block.rows - row)
        score_rows(layer.isa, scratch.split_queries, row, heads.size, scratch.paired_keys, scores)
        _weights(scores, 0, softmax, block, row, rows, layer)
        split(layer.isa, scores, 0, scratch.split_scores, 0, TILE * KEYS, rows * KEYS)
        weigh_rows(layer.isa, scratch.split_scores, scratch.paired_values, softmax.sums, row, rows, heads.value_size)


@njit(inline="always")
def _row_count(members, item, heads):
    return heads.queries // heads.kv * np.sum(members.counts[item.first : item.stop])


@njit(inline="always")
def _make_scratch(q, layer, members, item, head):
    """Scaled queries of all rows, and room for their scores."""
    heads, is_gathered = layer.heads, layer.page_size < LANES
    size, group, row = heads.size, heads.queries // heads.kv, 0
    rows = _row_count(members, item, heads)
    is_split = can_multiply(layer.isa, layer.kv.keys, heads)
    room = rows + min(rows, TILE) if is_split else rows
    queries = np.zeros(room * size, np.float32)
    for m in range(item.first, item.stop):
        for r in range(members.counts[m] * group):
            at = ((members.tokens[m] + r // group) * heads.queries + head * group + r % group) * size
            for k in range(size):
                queries[row * size + k] = q[at + k] * layer.scoring.scale
            row += 1
    tile_k = LANES * size if is_gathered and not is_split else 0
    tile_v = LANES * heads.value_size if (is_gathered or heads.is_latent) and not is_split else 0
    split_queries = np.empty(2 * room * size if is_split else 0, np.uint16)
    split(layer.isa, queries, 0, split_queries, 0, room * size, room * size if is_split else 0)
    return Scratch(
        queries,
        np.empty((TILE if is_split else rows) * KEYS, np.float32),
        np.zeros(tile_k, np.float32),
        np.zeros(tile_v, np.float32),
        split_queries,
        np.empty(2 * TILE * KEYS if is_split else 0, np.uint16),
        np.empty(KEYS * size if is_split else 0, np.uint16),
        np.empty(KEYS * heads.value_size if is_split else 0, np.uint16),
    )


@njit(nogil=True, error_model="numpy")
def _attend_segment(scratch, softmax, layer, members, item, segment, head):
    """The softmax of all rows over one segment. Blocks that no row looks back on are not read."""
    heads, low = layer.heads, segment * SEGMENT
    softmax.sums[:], softmax.highest[:], softmax.weights[:] = 0, -np.inf, 0
    is_split = len(scratch.split_queries) > 0
    begin_products(layer.isa, is_split, min(_row_count(members, item, heads), TILE))
    group, row = heads.queries // heads.kv, 0
    for m in range(item.first - 1, item.stop):  # first what all share, through the table of the first
        is_shared = m < item.first
        pages = Pages(layer.tables[members.rows[max(m, item.first)]], layer.page_size)
        rows = _row_count(members, item, heads) if is_shared else members.counts[m] * group
        start, end = (0, item.shared) if is_shared else (item.shared, members.positions[m] + members.counts[m])
        first = item.shared if is_shared else members.positions[m]
        if layer.lookback and first > layer.lookback:
            start = max(start, (first - layer.lookback) // KEYS * KEYS)
        for at in range(max(start, low), min(end, low + SEGMENT), KEYS):
            block = Block(at, end, row, rows, first, group, layer.lookback)
            _attend_block(scratch, softmax, layer, pages, block, head)
        if not is_shared:
            row += rows
    end_products(layer.isa, is_split)


@njit(inline="always")
def _begin(layer, members, item, head):
    """A softmax before the first key. A sink is a key that has been seen already, and whose value is 0."""
    heads, sinks = layer.heads, layer.scoring.sinks
    rows, group = _row_count(members, item, heads), heads.queries // heads.kv
    whole = empty_softmax(rows, heads.value_size)
    if len(sinks):
        for row in range(rows):
            whole.highest[row] = sinks[head * group + row % group]
            whole.weights[row] = np.float32(1)
    return whole


@njit(inline="always")
def _write(whole, layer, members, item, head, out):
    """The weighted means of values, to where the queries are in `out`."""
    heads, row = layer.heads, 0
    size, group = heads.value_size, heads.queries // heads.kv
    for m in range(item.first, item.stop):
        for r in range(members.counts[m] * group):
            at = ((members.tokens[m] + r // group) * heads.queries + head * group + r % group) * size
            for k in range(size):
                out[at + k] = whole.sums[row * size + k] / whole.weights[row]
            row += 1


@njit(nogil=True, error_model="numpy")
def _attend_item(q, layer, members, item, head, out):
    """One item, with one head of keys and values: its segments in order."""
    size, rows = layer.heads.value_size, _row_count(members, item, layer.heads)
    scratch, softmax = _make_scratch(q, layer, members, item, head), empty_softmax(rows, size)
    whole = _begin(layer, members, item, head)
    start, end = members.positions[item.first], np.int64(0)
    for m in range(item.first, item.stop):
        end = max(end, members.positions[m] + members.counts[m])
    start = max(start - layer.lookback, 0) if layer.lookback else 0
    for segment in range(start // SEGMENT, (end + SEGMENT - 1) // SEGMENT):
        _attend_segment(scratch, softmax, layer, members, item, segment, head)
        for row in range(rows):
            merge_segment(softmax, row, whole, row, size)
    _write(whole, layer, members, item, head, out)


@njit(inline="always")
def _kept_at(place, layer, members, item, head):
    """The first row of a segment's softmax."""
    heads = layer.heads
    return place * heads.queries + head * _row_count(members, item, heads)


@njit(nogil=True, error_model="numpy")
def _attend_part(q, kept, layer, members, item, segment, place, head):
    """One segment of an item: its softmax is kept."""
    size, rows = layer.heads.value_size, _row_count(members, item, layer.heads)
    at = _kept_at(place, layer, members, item, head)
    sums = kept.sums[at * size : (at + rows) * size]
    softmax = Softmax(sums, kept.highest[at : at + rows], kept.weights[at : at + rows])
    scratch = _make_scratch(q, layer, members, item, head)
    _attend_segment(scratch, softmax, layer, members, item, segment, head)


@njit(nogil=True, error_model="numpy")
def _join(kept, layer, members, item, segments, place, head, out):
    """Merge the segments of an item, which were parts."""
    rows, size = _row_count(members, item, layer.heads), layer.heads.value_size
    whole = _begin(layer, members, item, head)
    at = _kept_at(place, layer, members, item, head)
    for _ in range(segments):
        for row in range(rows):
            merge_segment(kept, at + row, whole, row, size)
        at += rows * layer.heads.kv
    _write(whole, layer, members, item, head, out)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def attend(
    qkv, token_positions, slots, tables, item_members, item_shared, rows, tokens, counts, positions,
    part_items, part_segments, part_places, kept_queries, joined_items, joined_segments, joined_places, out,
    cos, sin, pairs, rotary_start, q_norm, k_norm, epsilon, keys, values, key_scales, value_scales,
    page_size, lookback, scale, cap, sinks, query_heads, kv_heads, size, value_size, is_latent, isa,
):  # fmt: skip
    """Rotate queries and keys, write keys and values to their slots, attend: out flat [tokens, heads, value size].

    Arguments of an entry point are plain: records are slow to pass from Python, so they are made here. Item i has
    members `item_members[i]` up to `item_members[i + 1]`, which share their first `item_shared[i]` positions, a
    multiple of 64, and 0 where `lookback` is not; tables int32 [rows, pages]. The segments that are parts have
    `kept_queries` queries together.
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
    parts = len(part_items)
    rooms = kept_queries * query_heads
    # Not with empty_softmax: here, filling an array is a parallel region of its own.
    kept = Softmax(np.empty(rooms * value_size, np.float32), np.empty(rooms, np.float32), np.empty(rooms, np.float32))
    for work in prange(parts * kv_heads):
        # One head after the other: its KV, read by item after item, may fit a core's own cache.
        head, part = work // parts, work % parts
        kv = LayerKV(keys, values, key_scales, value_scales)
        heads = Heads(query_heads, kv_heads, size, value_size, is_latent)
        layer = Layer(kv, tables, page_size, lookback, Scoring(scale, cap, sinks), heads, isa)
        number = part_items[part]
        item = Item(item_members[number], item_members[number + 1], item_shared[number])
        members = Members(rows, tokens, counts, positions)
        if part_segments[part] == WHOLE:
            _attend_item(q, layer, members, item, head, out)
        else:
            _attend_part(q, kept, layer, members, item, part_segments[part], part_places[part], head)
    for join in range(len(joined_items)):
        kv = LayerKV(keys, values, key_scales, value_scales)
        heads = Heads(query_heads, kv_heads, size, value_size, is_latent)
        layer = Layer(kv, tables, page_size, lookback, Scoring(scale, cap, sinks), heads, isa)
        number = joined_items[join]
        item = Item(item_members[number], item_members[number + 1], item_shared[number])
        members = Members(rows, tokens, counts, positions)
        for head in range(kv_heads):
            _join(kept, layer, members, item, joined_segments[join], joined_places[join], head, out)
