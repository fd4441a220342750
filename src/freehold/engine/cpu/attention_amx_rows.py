"""A few queries times a block of keys, and their probabilities times its values, with the bits of `attention_amx`.

Keys and values are not put in pairs, which takes longer than it saves for few rows. A matrix register takes 32 numbers
at a time. It adds up products of the even ones and of the odd ones apart, each from 0 with fused multiply-adds, then
both sums, and that to what it held (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS).
It takes numbers below 2**-126 for 0, which vectors do not: such a sum is nothing beside what it is added to.
"""

from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types

from freehold.engine.cpu.amx_only import with_amx
from freehold.engine.cpu.attention_tiles import TILES, TileEmitter
from freehold.engine.cpu.simd import FLOATS, LANES
from freehold.engine.cpu.softmax import KEYS
from freehold.engine.cpu.vectors import F32, I64, constant, intrinsic

DEPTH = 32  # bfloat16 numbers in a row of a register
VALUES = TILES * LANES  # columns of values that are multiplied together
HEIGHT = 3  # rows at most: two chains of additions for each of four panels stay in registers


class _Emitter(TileEmitter):
    def zeros(self):
        return self.begin(TILES, lambda row, panel: constant(FLOATS, 0.0))

    def join(self, totals, even, odd) -> None:
        """totals += even + odd"""
        builder = self.builder
        for of_rows in zip(totals, even, odd, strict=True):
            for total, *halves in zip(*of_rows, strict=True):
                both = builder.fadd(*(builder.load(half) for half in halves))
                builder.store(builder.fadd(builder.load(total), both), total)


def _score(height: int) -> Any:
    def define(typingctx, isa, queries, at, size, keys, starts, following, scores):
        def emit(context, builder, signature, values):
            emitter = _Emitter(context, builder, signature, values, height)
            _, _, first, length, _, begins, behind, _ = values
            totals = emitter.zeros()
            with cgutils.for_range(builder, builder.lshr(length, ir.Constant(I64, 5))) as chunk:
                chains = emitter.zeros(), emitter.zeros()
                with cgutils.for_range(builder, ir.Constant(I64, DEPTH // 2)) as loop:
                    for side in range(2):
                        number = emitter.linear((chunk.index, DEPTH), (loop.index, 2), side)
                        at, next_at = (
                            [emitter.linear(builder.extract_value(of, tile), (number, LANES)) for tile in range(TILES)]
                            for of in (begins, behind)
                        )
                        for place in next_at:
                            emitter.bring(4, place)

                        def factor(row, number=number):
                            return emitter.array(1, emitter.linear(first, (length, row), number), F32)

                        emitter.multiply(chains[side], factor, [emitter.vector(4, place) for place in at])
                emitter.join(totals, *chains)
            emitter.end(
                totals,
                lambda row, tile: emitter.array(7, ir.Constant(I64, row * KEYS + tile * LANES), FLOATS),
            )

        numbers = types.intp
        return types.void(isa, queries, numbers, numbers, keys, starts, following, scores), with_amx(emit)

    return intrinsic(define)


def _weigh(height: int) -> Any:
    def define(typingctx, isa, scores, values, starts, following, count, size, column, sums, to):
        def emit(context, builder, signature, given):
            emitter = _Emitter(context, builder, signature, given, height)
            _, _, _, begins, behind, valid, length, first, _, target = given
            totals, chains = emitter.zeros(), (emitter.zeros(), emitter.zeros())

            def place(row, panel):
                at = emitter.linear(target, first, (length, row), panel * LANES)
                return emitter.array(8, at, FLOATS)

            def add(tile, key, side):
                offset = emitter.linear(first, (key, length))
                at, next_at = (emitter.linear(builder.extract_value(of, tile), offset) for of in (begins, behind))
                for panel in range(TILES):
                    emitter.bring(2, emitter.linear(next_at, panel * LANES))

                def factor(row):
                    return emitter.array(1, emitter.linear(key, row * KEYS + tile * LANES), F32)

                vectors = [emitter.vector(2, emitter.linear(at, panel * LANES)) for panel in range(TILES)]
                emitter.multiply(chains[side], factor, vectors)

            one = ir.Constant(I64, 1)
            for tile in range(TILES):
                if tile % 2 == 0:  # a register begins anew
                    for chain in chains:
                        emitter.clear(chain)
                left = builder.sub(valid, ir.Constant(I64, tile * LANES))
                few = builder.icmp_signed("<", left, ir.Constant(I64, LANES))
                keys = builder.select(few, left, ir.Constant(I64, LANES))
                with cgutils.for_range(builder, builder.ashr(keys, one)) as loop:
                    for side in range(2):
                        add(tile, emitter.linear((loop.index, 2), side), side)
                is_odd = builder.and_(builder.icmp_signed(">", keys, ir.Constant(I64, 0)),
                                      builder.trunc(keys, ir.IntType(1)))  # fmt: skip
                with builder.if_then(is_odd):
                    add(tile, builder.sub(keys, one), 0)
                if tile % 2:
                    emitter.join(totals, *chains)
            for row, of_row in enumerate(totals):
                for panel, total in enumerate(of_row):
                    before = builder.load(place(row, panel), align=4)
                    builder.store(builder.fadd(before, builder.load(total)), place(row, panel), align=4)

        numbers = types.intp
        return (
            types.void(isa, scores, values, starts, following, numbers, numbers, numbers, sums, numbers),
            with_amx(emit),
        )

    return intrinsic(define)


_score3, _score1 = (_score(height) for height in (HEIGHT, 1))
_weigh3, _weigh1 = (_weigh(height) for height in (HEIGHT, 1))


# Not inlined: they would be compiled once for each place that calls them.
@njit(nogil=True, error_model="numpy")
def score_few(isa, queries, at, size, keys, starts, following, scores, height):
    """As `attention_tiles.score_rows`; `height` is HEIGHT or 1, `size` a multiple of DEPTH."""
    if height == HEIGHT:
        _score3(isa, queries, at, size, keys, starts, following, scores)
    else:
        _score1(isa, queries, at, size, keys, starts, following, scores)


@njit(nogil=True, error_model="numpy")
def weigh_few(isa, scores, values, starts, following, count, size, sums, to, height):
    """As `attention_tiles.weigh_rows`; `height` is HEIGHT or 1, `size` a multiple of VALUES."""
    for column in range(0, size, VALUES):
        if height == HEIGHT:
            _weigh3(isa, scores, values, starts, following, count, size, column, sums, to)
        else:
            _weigh1(isa, scores, values, starts, following, count, size, column, sums, to)
