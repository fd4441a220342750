"""One block of keys: scores of some queries, probabilities, and the sums of values.

Products are those of floats (`tile.py`), or where the processor has registers for it and KV is bfloat16, those of
`attention_amx`.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from freehold.engine.cpu.attention_amx import TILE, pair_keys, pair_values, score_rows, split, weigh_rows
from freehold.engine.cpu.simd import add, element, exp, load, mul, reciprocal, splat, store, sub
from freehold.engine.cpu.softmax import KEYS, LANES, take_block
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
def attend_block(scratch, softmax, layer, pages, block, head):
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
