"""A few queries times a block of keys, and their probabilities times its values, bit-identical to `attention_amx`.

Keys and values are not paired, which would cost more than it saves for few rows. A tile register takes 32 numbers at a
time. It sums products of even and of odd numbers separately, each from 0 with fused multiply-adds, then adds both sums,
and that to its old value (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS). It
flushes numbers below 2**-126 to 0, which vectors do not: such a sum is negligible beside what it is added to.
"""

from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types

from freehold.engine.cpu.amx_only import with_amx
from freehold.engine.cpu.attention_amx import DEPTH, VALUES
from freehold.engine.cpu.attention_tiles import TILES, TileEmitter, Tiles
from freehold.engine.cpu.simd import FLOATS, LANES
from freehold.engine.cpu.softmax import KEYS
from freehold.engine.cpu.vectors import I64, constant, intrinsic

HEIGHT = 3  # rows at most: two chains of additions for each of four panels stay in registers


class _Emitter(TileEmitter):
    def zeros(self):
        return self.begin(TILES, lambda row, panel: constant(FLOATS, 0.0))

    def add(self, sums, others) -> None:
        """Add `others` to `sums`."""
        builder = self.builder
        for of_row, of_others in zip(sums, others, strict=True):
            for place, other in zip(of_row, of_others, strict=True):
                builder.store(builder.fadd(builder.load(place), builder.load(other)), place)

    def join(self, totals, even, odd) -> None:
        """Add both chains to `totals`."""
        self.add(even, odd)
        self.add(totals, even)


def _score(height: int) -> Any:
    def define(typingctx, isa, queries, at, size, keys, starts, following, scores):
        def emit(context, builder, signature, values):
            emitter = _Emitter(context, builder, signature, values, height)
            _, _, first, length, _, begins, behind, _ = values
            totals, tiles = emitter.zeros(), Tiles(4, begins, behind)
            with cgutils.for_range(builder, builder.sdiv(length, ir.Constant(I64, DEPTH))) as chunk:
                chains = emitter.zeros(), emitter.zeros()
                with cgutils.for_range(builder, ir.Constant(I64, DEPTH // 2)) as loop:
                    for side, chain in enumerate(chains):
                        number = emitter.linear((chunk.index, DEPTH), (loop.index, 2), side)
                        emitter.add_number(chain, 1, first, length, tiles, number)
                emitter.join(totals, *chains)
            emitter.end(totals, lambda row, tile: emitter.array(7, ir.Constant(I64, row * KEYS + tile * LANES), FLOATS))

        numbers = types.intp
        return types.void(isa, queries, numbers, numbers, keys, starts, following, scores), with_amx(emit)

    return intrinsic(define)


def _weigh(height: int) -> Any:
    def define(typingctx, isa, scores, values, starts, following, count, size, column, sums, to):
        def emit(context, builder, signature, given):
            emitter = _Emitter(context, builder, signature, given, height)
            _, _, _, begins, behind, valid, length, first, _, target = given

            def place(row, panel):
                at = emitter.linear(target, first, (length, row), panel * LANES)
                return emitter.array(8, at, FLOATS)

            tiles = Tiles(2, begins, behind)
            totals = emitter.begin(TILES, lambda row, panel: builder.load(place(row, panel), align=4))
            for chunk in range(KEYS // DEPTH):
                chains = emitter.zeros(), emitter.zeros()
                for tile in range(chunk * DEPTH // LANES, (chunk + 1) * DEPTH // LANES):

                    def add(key, side, tile=tile, chains=chains):
                        offset = emitter.linear(first, (key, length))
                        emitter.add_key(chains[side], 1, tiles, tile, key, offset)

                    emitter.each_key(tile, valid, (0, 1), add)
                emitter.join(totals, *chains)
            emitter.end(totals, place)

        numbers = types.intp
        kinds = isa, scores, values, starts, following, numbers, numbers, numbers, sums, numbers
        return types.void(*kinds), with_amx(emit)

    return intrinsic(define)


_score3, _score1 = (_score(height) for height in (HEIGHT, 1))
_weigh3, _weigh1 = (_weigh(height) for height in (HEIGHT, 1))


# Not inlined: each call site would compile them again.
@njit(nogil=True, error_model="numpy")
def score_few(isa, queries, at, size, keys, starts, following, scores, height):
    """Compute scores as `attention_tiles.score_rows`; `height` is HEIGHT or 1, `size` a multiple of DEPTH."""
    if height == HEIGHT:
        _score3(isa, queries, at, size, keys, starts, following, scores)
    else:
        _score1(isa, queries, at, size, keys, starts, following, scores)


@njit(nogil=True, error_model="numpy")
def weigh_few(isa, scores, values, starts, following, count, size, sums, to, height):
    """Add values as `attention_tiles.weigh_rows`; `height` is HEIGHT or 1, `size` a multiple of VALUES."""
    for column in range(0, size, VALUES):
        if height == HEIGHT:
            _weigh3(isa, scores, values, starts, following, count, size, column, sums, to)
        else:
            _weigh1(isa, scores, values, starts, following, count, size, column, sums, to)
