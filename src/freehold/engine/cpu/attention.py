"""Causal attention over paged KV: prefill and decode in one kernel.

A work item (`items.py`) is one KV head of some members: up to QUERIES consecutive positions of one sequence, or twice
as many in a large step, or one position each of several sequences with a shared prefix. Shared pages are read once for
all members (cascade attention; Ye et al. 2024, Juravsky et al. 2024), then each member's own pages.

Keys are visited in blocks of 64, aligned to multiples of 64 positions, with a running softmax (FlashAttention). It
restarts every SEGMENT positions, and segments are merged in order, so that several threads can work on one row
(Flash-Decoding; Dao et al. 2023): long contexts with few KV heads need that. Blocks, segments and the order inside them
depend only on positions, never on page size, chunk, batch, threads or sharing, and so does the result.
"""

import numpy as np
from numba import from_dtype, njit, types

from freehold.engine.cpu.attention_amx import TILE, can_multiply
from freehold.engine.cpu.attention_amx import begin as begin_products
from freehold.engine.cpu.attention_amx import end as end_products
from freehold.engine.cpu.attention_block import Block, Layer, Pages, Places, Scoring, Scratch, attend_block, places_of
from freehold.engine.cpu.attention_pairs import has_pairs, rounds
from freehold.engine.cpu.attention_tiles import HEIGHT
from freehold.engine.cpu.borrowed import borrow, give_back, keep, take
from freehold.engine.cpu.cache_line import LINE
from freehold.engine.cpu.isa import Isa
from freehold.engine.cpu.items import SEGMENT, WHOLE, Item, Members
from freehold.engine.cpu.operation import Operation, compiled, counted, fields, given, made_once, numbers
from freehold.engine.cpu.pointwise import Heads, LayerKV, Rotation, rotate_and_write
from freehold.engine.cpu.simd import load, mul, put, round_bf16, splat, store
from freehold.engine.cpu.softmax import KEYS, LANES, Softmax, merge_segment
from freehold.engine.cpu.vectors import intrinsic


@njit(inline="always")
def _pages(layer, members, member):
    first = members.rows[member] * layer.table_columns
    return Pages(layer.tables[first : first + layer.table_columns], layer.page_size)


@njit(inline="always")
def _item(number, first_members, shared, counts, group):
    """Return item `number`; `group` queries of a position share a KV head."""
    first, stop = first_members[number], first_members[number + 1]
    queries = 0
    for member in range(first, stop):
        queries += counts[member]
    return Item(first, stop, shared[number], queries * group)


@njit(inline="always")
def _room_sizes(layer, rows):
    """Return the scratch sizes of an item with `rows` rows: floats for queries, block scores, key tiles and value
    tiles; words for queries, probabilities and a paired block; floats for a softmax."""
    heads, is_gathered = layer.heads, layer.page_size < LANES
    size, value_size = heads.size, heads.value_size
    softmax = rows * (value_size + 2)
    tile_k = KEYS * size if is_gathered else 0
    tile_v = KEYS * value_size if is_gathered or heads.is_latent else 0
    if rows >= HEIGHT and can_multiply(layer.isa, layer.kv.keys, heads):
        padded = rows + TILE
        return padded * size, TILE * KEYS, tile_k, tile_v, padded * size, TILE * KEYS, KEYS, softmax
    if rows >= HEIGHT and has_pairs(layer.kv.keys, layer.isa):
        return rows * size, HEIGHT * KEYS, tile_k, tile_v, rows * size, HEIGHT * KEYS, KEYS, softmax
    return rows * size, HEIGHT * KEYS, tile_k, tile_v, 0, 0, 0, softmax


@njit(inline="always")
def _make_room(layer, rows):
    """Allocate one array for all scratch and two softmaxes."""
    queries, scores, tile_k, tile_v, halves, weights, pairs, softmax = _room_sizes(layer, rows)
    words = halves + weights + pairs * (layer.heads.size + layer.heads.value_size)
    floats = queries + scores + TILE + TILE * LANES + 2 * KEYS + tile_k + tile_v + words // 2 + 2 * softmax
    return take(floats + 14 * LINE // 4)


@njit(inline="always")
def _part(room, at, count):
    """Take `count` floats from `at`. Return them and the start of the next part, aligned to a line."""
    return room[at : at + count], at + (count + LINE // 4 - 1) // (LINE // 4) * (LINE // 4)


@njit(inline="always")
def _softmax_in(room, at, rows, size):
    sums, at = _part(room, at, rows * size)
    levels, at = _part(room, at, rows)
    weights, at = _part(room, at, rows)
    return Softmax(sums, levels, weights), at


@njit(inline="always")
def _scratch_in(room, q, layer, members, item, head):
    """Lay out the scratch, with all rows' scaled queries. Return it and the start of the next part."""
    heads, rows, scale = layer.heads, item.rows, splat(layer.scoring.scale)
    size, group, row = heads.size, heads.queries // heads.kv, 0
    query_room, score_room, tile_k, tile_v, halves, weights, pairs, _ = _room_sizes(layer, rows)
    queries, at = _part(room, 0, query_room)
    scores, at = _part(room, at, score_room)
    tops, at = _part(room, at, TILE)
    lane_weights, at = _part(room, at, TILE * LANES)
    tiles_k, at = _part(room, at, tile_k)
    tiles_v, at = _part(room, at, tile_v)
    key_scales, at = _part(room, at, KEYS)
    value_scales, at = _part(room, at, KEYS)
    both, at = _part(room, at, halves // 2)
    probabilities, at = _part(room, at, weights // 2)
    paired_keys, at = _part(room, at, pairs * size // 2)
    paired_values, at = _part(room, at, pairs * heads.value_size // 2)
    is_rounded = rounds(layer.kv.keys)
    for m in range(item.first, item.stop):
        for r in range(members.counts[m] * group):
            from_ = ((members.tokens[m] + r // group) * heads.queries + head * group + r % group) * size
            for stretch in range(0, size, LANES):
                k = min(stretch, size - LANES)
                query = mul(load(q, from_ + k), scale)
                store(queries, row * size + k, round_bf16(query) if is_rounded else query)
            row += 1
    queries[row * size :] = 0
    words = both.view(np.uint16)
    for k in range(0, halves, LANES):
        put(words, k, load(queries, k))
    kind = layer.kv.keys.dtype
    scratch = Scratch(
        queries, scores, tops, lane_weights, tiles_k.view(kind), tiles_v.view(kind), key_scales, value_scales,
        words, probabilities.view(np.uint16), paired_keys.view(np.uint16), paired_values.view(np.uint16),
    )  # fmt: skip
    return scratch, at


@njit(inline="always")
def _attend_segment(scratch, softmax, layer, members, item, segment, head, next_places):
    """Compute the softmax of all rows over one segment. Blocks outside every row's window are not read. `next_places`:
    the keys that are read afterwards, to prefetch."""
    heads, low = layer.heads, segment * SEGMENT
    softmax.sums[:], softmax.levels[:], softmax.weights[:] = 0, -np.inf, 0
    has_words = len(scratch.query_words) > 0
    begin_products(layer.isa, has_words, min(item.rows, TILE))
    group, row = heads.queries // heads.kv, 0
    for m in range(item.first - 1, item.stop):  # first the shared part, through the first member's table
        is_shared = m < item.first
        pages = _pages(layer, members, max(m, item.first))
        rows = item.rows if is_shared else members.counts[m] * group
        start, end = (0, item.shared) if is_shared else (item.shared, members.positions[m] + members.counts[m])
        first = item.shared if is_shared else members.positions[m]
        if layer.lookback and first > layer.lookback:
            start = max(start, (first - layer.lookback) // KEYS * KEYS)
        stop = min(end, low + SEGMENT)
        for at in range(max(start, low), stop, KEYS):
            block = Block(at, end, row, rows, first, group, layer.lookback)
            following = next_places
            if at + KEYS < stop and layer.page_size >= LANES:
                following = places_of(pages, at + KEYS, end, head)
            attend_block(scratch, softmax, layer, pages, block, head, following)
        if not is_shared:
            row += rows
    end_products(layer.isa, has_words)


@njit(inline="always")
def _first_places(layer, members, item, segment, head):
    """Return where an item's first keys are, or those of a segment."""
    member, start = item.first, max(segment, 0) * SEGMENT
    end = members.positions[member] + members.counts[member]
    if layer.lookback and members.positions[member] > layer.lookback:
        start = (members.positions[member] - layer.lookback) // KEYS * KEYS
    if layer.page_size < LANES or start >= end:
        return Places(np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(head))
    return places_of(_pages(layer, members, member), start, end, head)


@njit(inline="always")
def _begin(whole, layer, rows, head):
    """Initialize a softmax. A sink counts as a key already seen, with value 0."""
    heads, sinks = layer.heads, layer.scoring.sinks
    group = heads.queries // heads.kv
    whole.sums[:], whole.levels[:], whole.weights[:] = 0, -np.inf, 0
    if len(sinks):
        for row in range(rows):
            whole.levels[row] = sinks[head * group + row % group]
            whole.weights[row] = np.float32(1)


@njit(inline="always")
def _write(whole, layer, members, item, head, out):
    """Write the weighted means of values to `out`, at the queries' positions."""
    heads, row = layer.heads, 0
    size, group = heads.value_size, heads.queries // heads.kv
    for m in range(item.first, item.stop):
        for r in range(members.counts[m] * group):
            at = ((members.tokens[m] + r // group) * heads.queries + head * group + r % group) * size
            share = splat(np.float32(1) / whole.weights[row])
            for k in range(0, size, LANES):
                store(out, at + k, mul(load(whole.sums, row * size + k), share))
            row += 1


@njit(inline="always")
def _segments(layer, members, item):
    """Return the first segment in the window of an item's queries, and the end of the last."""
    start, end = members.positions[item.first], np.int64(0)
    for m in range(item.first, item.stop):
        end = max(end, members.positions[m] + members.counts[m])
    start = max(start - layer.lookback, 0) if layer.lookback else 0
    return start // SEGMENT, (end + SEGMENT - 1) // SEGMENT


@njit(inline="always")
def _kept_at(place, layer, members, item, head):
    """Return the first row of a segment's softmax."""
    heads = layer.heads
    return place * heads.queries + head * item.rows


@njit(inline="always")
def _attend_part(q, kept, layer, members, item, segment, place, head, next_places, room, out):
    """Compute an item with one KV head: one segment, whose softmax is kept, or for WHOLE, all segments in order."""
    size, rows, is_whole = layer.heads.value_size, item.rows, segment == WHOLE
    scratch, at = _scratch_in(room, q, layer, members, item, head)
    softmax, at = _softmax_in(room, at, rows, size)
    whole, at = _softmax_in(room, at, rows, size)
    first, stop = segment, segment + 1
    if is_whole:
        _begin(whole, layer, rows, head)
        first, stop = _segments(layer, members, item)
    else:
        at = _kept_at(place, layer, members, item, head)
        sums = kept.sums[at * size : (at + rows) * size]
        softmax = Softmax(sums, kept.levels[at : at + rows], kept.weights[at : at + rows])
    for number in range(first, stop):
        # Only sinks precede the first segment. Merging it with nothing would change no bit.
        is_alone = is_whole and number == first and not len(layer.scoring.sinks)
        _attend_segment(scratch, whole if is_alone else softmax, layer, members, item, number, head, next_places)
        for row in range(rows if is_whole and not is_alone else 0):
            merge_segment(softmax, row, whole, row, size)
    if is_whole:
        _write(whole, layer, members, item, head, out)


@njit(inline="always")
def _join(kept, layer, members, item, segments, place, head, room, out):
    """Merge the segments of a split item."""
    rows, size = item.rows, layer.heads.value_size
    whole, _ = _softmax_in(room, 0, rows, size)
    _begin(whole, layer, rows, head)
    at = _kept_at(place, layer, members, item, head)
    for _ in range(segments):
        for row in range(rows):
            merge_segment(kept, at + row, whole, row, size)
        at += rows * layer.heads.kv
    _write(whole, layer, members, item, head, out)


BATCH = fields(
    "positions slots tables columns item_members item_shared rows tokens counts starts"
    " parts part_items part_segments part_places joins joined_items joined_segments joined_places"
    " kept_sums kept_levels kept_weights"
)
"""Addresses of a `CpuBatch`'s arrays, the numbers of parts and joins, and the columns of a table."""
ATTENTION = fields(
    "cos sin pairs rotary_start q_norm q_norm_size k_norm k_norm_size epsilon:f keys values key_scales value_scales"
    " scale_count tile_step scale_step page_size lookback scale:f cap:f sinks sink_count query_heads kv_heads size"
    " value_size is_latent qkv queries out batch"
)
"""A layer: constants, then its inputs, room for rotated queries, outputs, and a BATCH."""
_BATCH = from_dtype(BATCH)


@intrinsic
def _batch_at(typingctx, address):
    def codegen(context, builder, signature, values):
        return builder.inttoptr(values[0], context.get_value_type(_BATCH))

    return _BATCH(types.int64), codegen


@njit(inline="always")
def _kv(of, kind):
    scales = counted(of.key_scales, np.float32, of.scale_count), counted(of.value_scales, np.float32, of.scale_count)
    return LayerKV(numbers(of.keys, kind), numbers(of.values, kind), *scales, of.tile_step, of.scale_step)


@njit(inline="always")
def _heads(of):
    return Heads(of.query_heads, of.kv_heads, of.size, of.value_size, of.is_latent != 0)


@njit(inline="always")
def _layer(of, batch, kind, isa):
    sinks = counted(of.sinks, np.float32, of.sink_count)
    scoring = Scoring(np.float32(of.scale), np.float32(of.cap), sinks)
    tables = numbers(batch.tables, np.int32)
    return Layer(_kv(of, kind), tables, batch.columns, of.page_size, of.lookback, scoring, _heads(of), isa)


@njit(inline="always")
def _members(batch):
    rows, tokens = numbers(batch.rows, np.int64), numbers(batch.tokens, np.int64)
    return Members(rows, tokens, numbers(batch.counts, np.int64), numbers(batch.starts, np.int64))


@njit(inline="always")
def _kept(batch):
    levels, weights = numbers(batch.kept_levels, np.float32), numbers(batch.kept_weights, np.float32)
    return Softmax(numbers(batch.kept_sums, np.float32), levels, weights)


@njit(inline="always")
def _item_of(number, batch, of):
    firsts, shared = numbers(batch.item_members, np.int64), numbers(batch.item_shared, np.int64)
    return _item(number, firsts, shared, numbers(batch.counts, np.int64), of.query_heads // of.kv_heads)


@njit(inline="always")
def _most_rows(items, count, batch, of):
    """Return the most rows of the first `count` items."""
    most = np.int64(0)
    for number in range(count):
        most = max(most, _item_of(items[number], batch, of).rows)
    return most


@made_once
def rotating(kind: type[np.generic]) -> Operation:
    """Return the operation over tokens that rotates queries and keys, and writes keys and values to their slots."""

    def rotate(at, first, stop):
        of = given(at)
        batch = _batch_at(of.batch)
        positions, slots = numbers(batch.positions, np.int64), numbers(batch.slots, np.int64)
        q_norm, k_norm = (
            counted(of.q_norm, np.float32, of.q_norm_size),
            counted(of.k_norm, np.float32, of.k_norm_size),
        )
        cos, sin = numbers(of.cos, np.float32), numbers(of.sin, np.float32)
        rotation = Rotation(cos, sin, of.pairs, of.rotary_start, q_norm, k_norm, np.float32(of.epsilon))
        qkv, queries = numbers(of.qkv, np.float32), numbers(of.queries, np.float32)
        heads, kv, owner = _heads(of), _kv(of, kind), np.empty(of.size, np.float32)
        key = borrow(owner)
        for token in range(first, stop):
            rotate_and_write(token, qkv, positions[token], slots[token], rotation, heads, kv, key, queries)
        keep(owner)

    return compiled(rotate, ATTENTION)


@made_once
def attending(kind: type[np.generic], isa: Isa) -> Operation:
    """Return the operation over parts, head by head: a head's KV, read by consecutive items, may fit a core's cache."""

    def attend(at, first, stop):
        of = given(at)
        batch = _batch_at(of.batch)
        layer, members, kept = _layer(of, batch, kind, isa), _members(batch), _kept(batch)
        queries, out = numbers(of.queries, np.float32), numbers(of.out, np.float32)
        items, segments = numbers(batch.part_items, np.int64), numbers(batch.part_segments, np.int64)
        places = numbers(batch.part_places, np.int64)
        room = _make_room(layer, _most_rows(items, batch.parts, batch, of))
        last = batch.parts * of.kv_heads - 1
        for task in range(first, stop):
            head, part = task // batch.parts, task % batch.parts
            after = min(task + 1, last)
            next_part = after % batch.parts
            next_item = _item_of(items[next_part], batch, of)
            following = _first_places(layer, members, next_item, segments[next_part], after // batch.parts)
            item = _item_of(items[part], batch, of)
            segment, place = segments[part], places[part]
            _attend_part(queries, kept, layer, members, item, segment, place, head, following, room, out)
        give_back(room)

    return compiled(attend, ATTENTION, counts_owners=False)


@made_once
def joining(kind: type[np.generic], isa: Isa) -> Operation:
    """Return the operation that merges split items, for each KV head."""

    def join(at, first, stop):
        of = given(at)
        batch = _batch_at(of.batch)
        layer, members, kept = _layer(of, batch, kind, isa), _members(batch), _kept(batch)
        items, segments = numbers(batch.joined_items, np.int64), numbers(batch.joined_segments, np.int64)
        places, out = numbers(batch.joined_places, np.int64), numbers(of.out, np.float32)
        room = _make_room(layer, _most_rows(items, batch.joins, batch, of))
        for task in range(first, stop):
            number, head = task // of.kv_heads, task % of.kv_heads
            item = _item_of(items[number], batch, of)
            _join(kept, layer, members, item, segments[number], places[number], head, room, out)
        give_back(room)

    return compiled(join, ATTENTION, counts_owners=False)
