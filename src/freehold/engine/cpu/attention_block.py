"""One block of keys: scores of some queries, probabilities, and the sums of values.

Products are in floats (`tile.py`), or for bfloat16 KV with tile registers, those of `attention_amx`.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numba.extending import overload

from freehold.engine.cpu.amx_only import is_amx
from freehold.engine.cpu.attention_amx import TILE, can_multiply, pair_keys, pair_values
from freehold.engine.cpu.attention_amx import score_rows as score_rows_amx
from freehold.engine.cpu.attention_amx import weigh_rows as weigh_rows_amx
from freehold.engine.cpu.attention_amx_rows import HEIGHT as FEW
from freehold.engine.cpu.attention_amx_rows import score_few, weigh_few
from freehold.engine.cpu.attention_pairs import pair_block, rounds, score_pairs, weigh_pairs
from freehold.engine.cpu.attention_tiles import HEIGHT, TILES, bring, score_rows, weigh_rows
from freehold.engine.cpu.simd import add, exp, load, mul, reciprocal, splat, store, sub, sum_lanes
from freehold.engine.cpu.softmax import KEYS, LANES, highest_visible, take_block
from freehold.engine.cpu.tile import tile_height


class Pages(NamedTuple):
    """A sequence's page table: `table` int32 [pages]."""

    table: Any
    size: int


class Scoring(NamedTuple):
    """How scores are computed: `scale` times the product of query and key, then `cap * tanh(score / cap)` unless the
    cap is 0. `sinks` [query heads], empty for none, are scores that take attention away from all keys."""

    scale: Any
    cap: Any
    sinks: Any


class Layer(NamedTuple):
    """A layer's cache and attention parameters. Page tables are consecutive, each `table_columns` long. `lookback` 0 is
    all. `isa` is that of bfloat16 products."""

    kv: Any
    tables: Any
    table_columns: int
    page_size: int
    lookback: int
    scoring: Any
    heads: Any
    isa: Any


class Scratch(NamedTuple):
    """Scratch memory of an item: scaled queries [rows, size]; block scores [a few rows, KEYS], and each row's top score
    and weight sums by lane. Tiles of the block's keys and values if pages are smaller than a tile, in the cache's
    layout, and scales of its positions if the format has any. For paired products (`attention_pairs`, `attention_amx`),
    bfloat16 queries and probabilities, and paired keys and values of a block. Queries are padded with zeros to fill a
    tile register."""

    queries: Any
    scores: Any
    tops: Any
    lane_weights: Any
    tiles_k: Any
    tiles_v: Any
    key_scales: Any
    value_scales: Any
    query_words: Any
    weight_words: Any
    paired_keys: Any
    paired_values: Any


class Block(NamedTuple):
    """A block of keys from position `start`, of which those before `end` exist, for rows `row` up to `row + rows`. Row
    `row + r` sees positions below `first + r // group + 1`, and with a nonzero `lookback` only that many before its
    own."""

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
def _tile_numbers(pages, start, end):
    """Return the tiles of the block's keys, if pages hold whole tiles; any tile where there is no key. Pages of one
    tile are looked up; larger ones hold the whole block."""
    first, table = start // LANES, pages.table
    if pages.size == LANES:
        last = (end - 1) // LANES
        return table[first], table[min(first + 1, last)], table[min(first + 2, last)], table[min(first + 3, last)]
    tile = _slot(pages, start) // LANES
    return tile, tile + 1, tile + 2, tile + 3


class Places(NamedTuple):
    """Four tiles, and the head whose part is used."""

    first: Any
    second: Any
    third: Any
    fourth: Any
    head: Any


@njit(inline="always")
def places_of(pages, start, end, head):
    """Return a head's parts of the four tiles that hold a block's keys `start` up to `end`."""
    first, second, third, fourth = _tile_numbers(pages, start, end)
    return Places(np.int64(first), np.int64(second), np.int64(third), np.int64(fourth), np.int64(head))


@njit(inline="always")
def _starts(places, step, size):
    """Return where the head's parts of the four tiles start. Tiles are `step` apart, and a part has `size` numbers."""
    own = places.head * size
    return places.first * step + own, places.second * step + own, places.third * step + own, places.fourth * step + own


# The places of a block's keys in `Scratch`.
_GATHERED = Places(0, 1, 2, 3, 0)


@njit(inline="always")
def _gather_scales(scales, starts, out):
    """Gather the scales of a block's positions, if pages hold whole tiles."""
    first, second, third, fourth = starts
    store(out, 0, load(scales, first))
    store(out, LANES, load(scales, second))
    store(out, 2 * LANES, load(scales, third))
    store(out, 3 * LANES, load(scales, fourth))


@njit(nogil=True, error_model="numpy")
def _gather_slots(scratch, kv, pages, block, count, head, heads):
    """Gather a block's keys, values and scales, if a tile spans several pages."""
    size, value_size = heads.size, heads.value_size
    for j in range(count):
        slot = _slot(pages, block.start + j)
        tile, lane, to = slot // LANES, slot % LANES, j // LANES * LANES
        at = tile * kv.tile_step
        for k in range(size):
            scratch.tiles_k[(to * size + k * LANES) + j % LANES] = kv.keys[at + (head * size + k) * LANES + lane]
        if not heads.is_latent:
            for k in range(value_size):
                scratch.tiles_v[j * value_size + k] = kv.values[at + (head * LANES + lane) * value_size + k]
        if len(kv.key_scales):
            at = tile * kv.scale_step + head * LANES + lane
            scratch.key_scales[j] = kv.key_scales[at]
            if not heads.is_latent:
                scratch.value_scales[j] = kv.value_scales[at]


@njit(nogil=True, error_model="numpy")
def _gather_latents(scratch, kv, pages, block, count, head, heads):
    """Gather the values of latents, the first numbers of keys, which are in lanes."""
    for j in range(count):
        slot = _slot(pages, block.start + j)
        at = slot // LANES * kv.tile_step + head * heads.size * LANES + slot % LANES
        for k in range(heads.value_size):
            scratch.tiles_v[j * heads.value_size + k] = kv.keys[at + k * LANES]


@njit(inline="always")
def _scale(scores, rows, scales):
    """Multiply rows of scores by each position's scale."""
    for r in range(rows):
        for t in range(r * KEYS, (r + 1) * KEYS, LANES):
            store(scores, t, mul(load(scales, t - r * KEYS), load(scores, t)))


@njit(inline="always")
def _bring(numbers, starts, size):
    """Prefetch keys or values."""
    for start in starts:
        bring(numbers, start, size)


class _Found(NamedTuple):
    """The four tiles each of a block's keys and values, and those to prefetch."""

    keys: Any
    key_starts: Any
    next_keys: Any
    values: Any
    value_starts: Any
    next_values: Any


@njit(inline="always")
def _find(scratch, kv, pages, block, head, heads, next_places):
    """Locate a block. Data in several pages or in lanes is gathered, and scales always are."""
    size, value_size = heads.size * LANES, heads.value_size * LANES
    count = min(KEYS, block.end - block.start)
    gathered_k, gathered_v = _starts(_GATHERED, size, 0), _starts(_GATHERED, value_size, 0)
    if pages.size < LANES:
        _gather_slots(scratch, kv, pages, block, count, head, heads)
        if heads.is_latent:
            _gather_latents(scratch, kv, pages, block, count, head, heads)
        return _Found(scratch.tiles_k, gathered_k, gathered_k, scratch.tiles_v, gathered_v, gathered_v)
    places = places_of(pages, block.start, block.end, head)
    starts, following = _starts(places, kv.tile_step, size), _starts(next_places, kv.tile_step, size)
    if block.rows >= HEIGHT:
        _bring(kv.keys, following, size)
    if len(kv.key_scales):
        _gather_scales(kv.key_scales, _starts(places, kv.scale_step, LANES), scratch.key_scales)
    if heads.is_latent:
        _gather_latents(scratch, kv, pages, block, count, head, heads)
        return _Found(kv.keys, starts, following, scratch.tiles_v, gathered_v, gathered_v)
    value_starts = _starts(places, kv.tile_step, value_size)
    next_values = _starts(next_places, kv.tile_step, value_size)
    if block.rows >= HEIGHT:
        _bring(kv.values, next_values, value_size)
    if len(kv.key_scales):
        _gather_scales(kv.value_scales, _starts(places, kv.scale_step, LANES), scratch.value_scales)
    return _Found(kv.keys, starts, following, kv.values, value_starts, next_values)


@njit(inline="always")
def _attend_vectors(scratch, softmax, layer, block, found):
    """Attend for all rows, a few at a time: their scores and the block stay in L1."""
    isa, heads, scores = layer.isa, layer.heads, scratch.scores
    size, value_size, count = heads.size, heads.value_size, min(KEYS, block.end - block.start)
    has_scales = len(layer.kv.key_scales) > 0
    value_scales = scratch.key_scales if heads.is_latent else scratch.value_scales
    has_pairs = len(scratch.query_words) > 0 and block.rows >= HEIGHT
    as_amx = can_multiply(isa, layer.kv.keys, heads)
    if has_pairs:
        pair_block(scratch, found, size, value_size, count)
    row, end = block.row, block.row + block.rows
    while row < end:
        height = tile_height(min(end - row, FEW) if as_amx else end - row)
        is_paired = has_pairs and height == HEIGHT
        at, to = row * size, row * value_size
        if is_paired:
            score_pairs(isa, scratch.query_words, at, size, scratch.paired_keys, scores)
        elif as_amx:
            score_few(isa, scratch.queries, at, size, found.keys, found.key_starts, found.next_keys, scores, height)
        else:
            score_rows(scratch.queries, at, size, found.keys, found.key_starts, found.next_keys, scores, height)
        if has_scales:
            _scale(scores, height, scratch.key_scales)
        _weights(scratch, softmax, block, row, height, layer, is_paired)
        if has_scales:
            _scale(scores, height, value_scales)
        starts, following = found.value_starts, found.next_values
        if is_paired:
            weigh_pairs(isa, scratch.weight_words, scratch.paired_values, count, value_size, softmax.sums, to)
        elif as_amx:
            weigh_few(isa, scores, found.values, starts, following, count, value_size, softmax.sums, to, height)
        else:
            weigh_rows(scores, found.values, starts, following, count, value_size, softmax.sums, to, height)
        row += height


def _attend_registers(scratch, softmax, layer, block, found):
    """Attend for all rows, 16 at a time, in AMX tile registers."""
    isa, size, value_size = layer.isa, layer.heads.size, layer.heads.value_size
    for number in range(TILES):
        count = min(max(block.end - block.start - number * LANES, 0), LANES)
        pair_keys(isa, found.keys, found.key_starts[number], size, scratch.paired_keys, number)
        pair_values(isa, found.values, found.value_starts[number], value_size, scratch.paired_values, number, count)
    height = min(len(softmax.levels), TILE)
    for row in range(block.row, block.row + block.rows, TILE):  # 16 rows at a time stay in L1
        rows = min(TILE, block.row + block.rows - row)
        score_rows_amx(isa, scratch.query_words, row, size, scratch.paired_keys, scratch.scores)
        _weights(scratch, softmax, block, row, rows, layer, True)
        weigh_rows_amx(isa, scratch.weight_words, scratch.paired_values, softmax.sums, row, rows, height, value_size)


def _attend_nothing(scratch, softmax, layer, block, found):
    pass


_OPTIONS: Any = {"nogil": True, "error_model": "numpy", "_nrt": False}


@overload(_attend_registers, jit_options=_OPTIONS)
def _where_registers_are(scratch, softmax, layer, block, found):
    """Compile it only for AMX: other instruction sets would never run it."""
    return _attend_registers if is_amx(layer) else _attend_nothing


@njit(inline="always")
def _cap(scores, begin, end, cap):
    """Compute score = cap * tanh(score / cap), as cap - 2 cap / (exp(2 score / cap) + 1)."""
    slope, top, twice = splat(np.float32(2) / cap), splat(cap), splat(np.float32(2) * cap)
    one = splat(np.float32(1))
    for at in range(begin, end, LANES):
        grown = add(exp(mul(slope, load(scores, at))), one)
        store(scores, at, sub(top, mul(twice, reciprocal(grown))))


@njit(inline="always")
def _is_whole(block):
    """Return whether every row sees every key. It saves `_visible`, whose division is slow, for each row."""
    if block.first + 1 < block.start + KEYS:
        return False
    return not block.lookback or block.first + (block.rows - 1) // block.group <= block.start + block.lookback


@njit(inline="always")
def _visible(block, row):
    """Return the first key of the block that a row sees, and the end. The end is 0 if the row sees none."""
    own = block.first + (row - block.row) // block.group - block.start
    hidden = own - block.lookback if block.lookback else 0
    return hidden, own + 1 if hidden < KEYS else 0


@njit(inline="always")
def _weights(scratch, softmax, block, first, rows, layer, in_words):
    """Turn scores of rows `first` up to `first + rows` into probabilities, in place or as words. Top scores of all rows
    are found first, and weights are summed last: both are dependency chains, which the CPU overlaps for several
    rows."""
    scores, tops, is_rounded = scratch.scores, scratch.tops, rounds(layer.kv.keys)
    words = scratch.weight_words[: rows * KEYS if in_words else 0]
    if layer.scoring.cap > 0:
        _cap(scores, 0, rows * KEYS, layer.scoring.cap)
    is_whole = _is_whole(block)
    for number in range(rows):
        hidden, valid = (0, KEYS) if is_whole else _visible(block, first + number)
        tops[number] = highest_visible(scores, number * KEYS, hidden, valid)
    size, weights = layer.heads.value_size, scratch.lane_weights
    for number in range(rows):
        at, to, top = number * KEYS, number * LANES, tops[number]
        if top != -np.inf:
            store(weights, to, take_block(softmax, first + number, scores, at, top, size, is_rounded, words))
        else:
            scores[at : at + KEYS], weights[to : to + LANES] = np.float32(0), np.float32(0)
            if len(words):
                words[at : at + KEYS] = 0
    for number in range(rows):
        softmax.weights[first + number] += sum_lanes(load(weights, number * LANES))


@njit(inline="always")
def attend_block(scratch, softmax, layer, pages, block, head, next_places):
    """Attend to a block's keys for its rows. `next_places`: the keys to prefetch (`places_of`)."""
    found = _find(scratch, layer.kv, pages, block, head, layer.heads, next_places)
    if block.rows >= HEIGHT and can_multiply(layer.isa, layer.kv.keys, layer.heads):
        _attend_registers(scratch, softmax, layer, block, found)
    else:
        _attend_vectors(scratch, softmax, layer, block, found)
