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

import numpy as np
from numba import njit, prange

from freehold.engine.cpu.attention_amx import TILE, can_multiply, split
from freehold.engine.cpu.attention_amx import begin as begin_products
from freehold.engine.cpu.attention_amx import end as end_products
from freehold.engine.cpu.attention_block import Block, Layer, Pages, Scoring, Scratch, attend_block
from freehold.engine.cpu.cache_line import LINE, aligned
from freehold.engine.cpu.items import SEGMENT, WHOLE, Item, Members
from freehold.engine.cpu.pointwise import ROWS_PARALLEL, Heads, LayerKV, Rotation, rotate_and_write
from freehold.engine.cpu.softmax import KEYS, LANES, Softmax, empty_softmax, merge_segment


@njit(inline="always")
def _row_count(members, item, heads):
    return heads.queries // heads.kv * np.sum(members.counts[item.first : item.stop])


@njit(inline="always")
def _words(count):
    return aligned(np.empty(count + LINE // 2, np.uint16))


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
    split_queries = _words(2 * room * size if is_split else 0)
    split(layer.isa, queries, 0, split_queries, 0, room * size, room * size if is_split else 0)
    return Scratch(
        queries,
        aligned(np.empty((TILE if is_split else rows) * KEYS + LINE // 4, np.float32)),
        np.zeros(tile_k, np.float32),
        np.zeros(tile_v, np.float32),
        split_queries,
        _words(2 * TILE * KEYS if is_split else 0),
        _words(KEYS * size if is_split else 0),
        _words(KEYS * heads.value_size if is_split else 0),
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
            attend_block(scratch, softmax, layer, pages, block, head)
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
