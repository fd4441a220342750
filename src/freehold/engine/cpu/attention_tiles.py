"""Attention products in floats: a few queries times a block of keys, and their probabilities times its values.

A block is four tiles of 16 positions, which are apart where pages are. With AVX-512 all four are multiplied together,
so that a query number is read once for 64 keys, with enough chains of additions to hide their latency; with AVX2, which
has half as many registers of half the size, one after the other. Few rows are memory-bound, so the next block is
prefetched line by line during the products: the CPU stalls on many prefetches at once.

Each score sums over a key's numbers, and each value over positions, ascending, with one fused multiply-add each:
bit-identical in any tile. With bfloat16 KV the other factor is rounded to it too, and the second of two neighbours
comes first, as in the instruction for such pairs (`attention_pairs`).
"""

from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types

from freehold.engine.cpu.integer_tiles import Records
from freehold.engine.cpu.simd import FLOATS, LANES, lanes
from freehold.engine.cpu.softmax import KEYS
from freehold.engine.cpu.vectors import F32, I8, I64, constant, intrinsic, math, prefetch, splat

TILES = KEYS // LANES
PANELS = TILES if llvm.get_host_cpu_features().get("avx512f") else 1  # that are multiplied together
HEIGHT = 6  # rows at most
LINE = 64  # bytes


class Tiles(NamedTuple):
    """The argument of an intrinsic that holds a block's keys or values: where its four tiles start, and those to
    prefetch. For a loop over tiles, these numbers are in memory."""

    argument: int
    starts: Any
    following: Any


class TileEmitter(Records):
    """Emits sums of `height` rows and some panels of 16 lanes, which stay in registers."""

    def __init__(self, context, builder, signature, values, height: int):
        super().__init__(context, builder, signature, values)
        self.rows = range(height)

    def pair(self, array: int):
        """Return the order in which two neighbours are added."""
        return (1, 0) if self.kinds[array].dtype == types.uint16 else (0, 1)

    def vector(self, argument: int, at):
        """Load 16 numbers of an array as floats."""
        return lanes(self.builder, lambda kind: self.array(argument, at, kind), self.kinds[argument].dtype)

    def bring(self, argument: int, at) -> None:
        """With few rows, prefetch the line of an array's number: the next block reads it."""
        if len(self.rows) < HEIGHT:
            prefetch(self.builder, self.array(argument, at, I8))

    def begin(self, panels: int, first) -> list[list[Any]]:
        """Return sums [rows][panels] initialized by first(row, panel)."""
        sums = [[cgutils.alloca_once(self.builder, FLOATS) for _ in range(panels)] for _ in self.rows]
        for row, of_row in enumerate(sums):
            for panel, place in enumerate(of_row):
                self.builder.store(first(row, panel), place)
        return sums

    def multiply(self, sums, factor, vectors) -> None:
        """Add factor(row), one number, times vectors [panels] to sums."""
        for row, of_row in enumerate(sums):
            number = splat(self.builder, self.builder.load(factor(row)), FLOATS)
            for place, vector in zip(of_row, vectors, strict=True):
                self.builder.store(math(self.builder, "fma", [number, vector, self.builder.load(place)]), place)

    def add_number(self, sums, queries: int, first, length, keys: Tiles, number) -> None:
        """Add a number of each query times that of all keys to sums. Queries, also an argument, start at `first`, each
        `length` long."""
        at, next_at = (
            [self.linear(self.builder.extract_value(of, tile), (number, LANES)) for tile in range(len(sums[0]))]
            for of in (keys.starts, keys.following)
        )
        for place in next_at:
            self.bring(keys.argument, place)

        def factor(row):
            return self.array(queries, self.linear(first, (length, row), number), F32)

        self.multiply(sums, factor, [self.vector(keys.argument, place) for place in at])

    def _start(self, starts, tile):
        if not isinstance(starts.type, ir.PointerType):
            return self.builder.extract_value(starts, tile)
        return self.builder.load(cgutils.gep_inbounds(self.builder, starts, 0, tile))

    def add_key(self, sums, weights: int, values: Tiles, tile, key, offset) -> None:
        """Add a key's weight in each row times its values, `offset` after the tile's start, to sums. Weights are an
        argument, too."""
        at, next_at = (self.linear(self._start(of, tile), offset) for of in (values.starts, values.following))
        panels = [panel * LANES for panel in range(len(sums[0]))]
        for panel in panels:
            self.bring(values.argument, self.linear(next_at, panel))

        def factor(row):
            return self.array(weights, self.linear(key, row * KEYS, (tile, LANES)), F32)

        self.multiply(sums, factor, [self.vector(values.argument, self.linear(at, panel)) for panel in panels])

    def each_key(self, tile, valid, sides, add) -> None:
        """Call add(key, side) for each key of a tile before `valid`: pairs in the order of `sides`, then an unpaired
        last one. An even key is on side 0."""
        builder, one = self.builder, ir.Constant(I64, 1)
        left = builder.sub(valid, self.linear((tile, LANES)))
        few = builder.icmp_signed("<", left, ir.Constant(I64, LANES))
        keys = builder.select(few, left, ir.Constant(I64, LANES))
        with cgutils.for_range(builder, builder.ashr(keys, one)) as loop:
            for side in sides:
                add(self.linear((loop.index, 2), side), side)
        is_odd = builder.and_(builder.icmp_signed(">", keys, ir.Constant(I64, 0)), builder.trunc(keys, ir.IntType(1)))
        with builder.if_then(is_odd):
            add(builder.sub(keys, one), 0)

    def end(self, sums, place) -> None:
        """Store sums to place(row, panel)."""
        for row, of_row in enumerate(sums):
            for panel, total in enumerate(of_row):
                self.builder.store(self.builder.load(total), place(row, panel), align=4)


def _score(height: int) -> Any:
    def define(typingctx, queries, at, size, keys, starts, following, scores, to):
        def codegen(context, builder, signature, values):
            emitter = TileEmitter(context, builder, signature, values, height)
            _, first, length, _, begins, behind, _, target = values
            tiles = Tiles(3, begins, behind)
            sums = emitter.begin(starts.count, lambda row, panel: constant(FLOATS, 0.0))
            with cgutils.for_range(builder, builder.lshr(length, ir.Constant(I64, 1))) as loop:
                for side in emitter.pair(3):
                    emitter.add_number(sums, 0, first, length, tiles, emitter.linear((loop.index, 2), side))
            emitter.end(
                sums, lambda row, panel: emitter.array(6, emitter.linear(target, row * KEYS + panel * LANES), FLOATS)
            )
            return context.get_dummy_value()

        numbers = types.intp
        return types.void(queries, numbers, numbers, keys, starts, following, scores, numbers), codegen

    return intrinsic(define)


def _weigh(height: int, panels: int) -> Any:
    def define(typingctx, scores, values, starts, following, count, size, column, sums, to):
        def codegen(context, builder, signature, given):
            emitter = TileEmitter(context, builder, signature, given, height)
            _, _, begins, behind, valid, length, first, _, target = given
            tiles = Tiles(1, *(cgutils.alloca_once_value(builder, starts) for starts in (begins, behind)))

            def place(row, panel):
                at = emitter.linear(target, first, (length, row), panel * LANES)
                return emitter.array(7, at, FLOATS)

            totals = emitter.begin(panels, lambda row, panel: builder.load(place(row, panel), align=4))
            # Unrolled, it would take seconds to compile.
            with cgutils.for_range(builder, ir.Constant(I64, TILES)) as loop:

                def add(key, side):
                    emitter.add_key(totals, 0, tiles, loop.index, key, emitter.linear(first, (key, length)))

                emitter.each_key(loop.index, valid, emitter.pair(1), add)
            emitter.end(totals, place)
            return context.get_dummy_value()

        numbers = types.intp
        return types.void(scores, values, starts, following, numbers, numbers, numbers, sums, numbers), codegen

    return intrinsic(define)


_score6, _score4, _score3, _score1 = (_score(height) for height in (6, 4, 3, 1))
_weigh6, _weigh4, _weigh3, _weigh1 = (_weigh(height, PANELS) for height in (6, 4, 3, 1))
_rest6, _rest4, _rest3, _rest1 = (_weigh(height, 1) for height in (6, 4, 3, 1))


@njit(inline="always")
def _score_panels(queries, at, size, keys, starts, following, scores, to, height):
    if height == 6:
        _score6(queries, at, size, keys, starts, following, scores, to)
    elif height == 4:
        _score4(queries, at, size, keys, starts, following, scores, to)
    elif height == 3:
        _score3(queries, at, size, keys, starts, following, scores, to)
    else:
        _score1(queries, at, size, keys, starts, following, scores, to)


# Not inlined: each call site would compile them again.
@njit(nogil=True, error_model="numpy")
def score_rows(queries, at, size, keys, starts, following, scores, height):
    """Compute scores [height, KEYS] of the queries [height, size] from `at` on with four tiles of keys [size, 16] at
    `starts`. Those at `following` are prefetched. `height` is one of `tile_height`."""
    if PANELS == TILES:
        _score_panels(queries, at, size, keys, starts, following, scores, 0, height)
    else:
        for tile in range(TILES):
            begin, behind = (starts[tile],), (following[tile],)
            _score_panels(queries, at, size, keys, begin, behind, scores, tile * LANES, height)


@njit(nogil=True, error_model="numpy")
def weigh_rows(scores, values, starts, following, count, size, sums, to, height):
    """Add to sums [height, size], from `to` on, scores [height, KEYS] times the first `count` values [16, size] of four
    tiles at `starts`. Those at `following` are prefetched. `height` is one of `tile_height`."""
    whole = size - size % (PANELS * LANES)
    for column in range(0, whole, PANELS * LANES):
        if height == 6:
            _weigh6(scores, values, starts, following, count, size, column, sums, to)
        elif height == 4:
            _weigh4(scores, values, starts, following, count, size, column, sums, to)
        elif height == 3:
            _weigh3(scores, values, starts, following, count, size, column, sums, to)
        else:
            _weigh1(scores, values, starts, following, count, size, column, sums, to)
    for column in range(whole, size, LANES):
        if height == 6:
            _rest6(scores, values, starts, following, count, size, column, sums, to)
        elif height == 4:
            _rest4(scores, values, starts, following, count, size, column, sums, to)
        elif height == 3:
            _rest3(scores, values, starts, following, count, size, column, sums, to)
        else:
            _rest1(scores, values, starts, following, count, size, column, sums, to)


def _define_bring(typingctx, array, at, count):
    def codegen(context, builder, signature, values):
        records = Records(context, builder, signature, values)
        step = LINE // (array.dtype.bitwidth // 8)
        lines = builder.udiv(builder.add(values[2], ir.Constant(I64, step - 1)), ir.Constant(I64, step))
        with cgutils.for_range(builder, lines) as loop:
            prefetch(builder, records.array(0, records.linear(values[1], (loop.index, step)), I8))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), codegen


bring: Any = intrinsic(_define_bring)
"""(array, at, count): prefetch this many numbers of an array."""
