"""The inner product shared by linear layers and attention.

out[r, lane] += sum over k of a[r, k] * b[k, lane], k ascending, one fused multiply-add each. Every tile shape sums in
this order, so a row's result does not depend on its grouping into tiles. Six rows of 16 lanes keep twelve AVX2
registers busy (the shape of BLIS's Haswell kernel).
"""

from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types

from freehold.engine.cpu.simd import FLOATS, LANES, lanes
from freehold.engine.cpu.vectors import F32, I64, intrinsic, math, pointer, splat


class Rows(NamedTuple):
    """Rows of a flat array: the first begins at `at`, each of the others `stride` further on."""

    values: Any
    at: int
    stride: int


def _element(context, builder, kind, rows, row, column):
    """Return where number `column`, an LLVM integer, of a row is."""
    values = builder.extract_value(rows, 0)
    first, stride = (context.cast(builder, builder.extract_value(rows, i), kind.types[i], types.intp) for i in (1, 2))
    at = builder.add(builder.add(first, builder.mul(row, stride)), column)
    return lambda vector: pointer(context, builder, kind.types[0], values, at, vector)


def _emit(context, builder, a, left, panels, length, out, target, height: int) -> None:
    """Add `height` rows of `a` times panels of 16 lanes, given as (kind, rows, column), side by side to `out`."""
    rows = [ir.Constant(I64, r) for r in range(height)]
    columns = [ir.Constant(I64, w * LANES) for w in range(len(panels))]
    places = [_element(context, builder, out, target, row, column) for row in rows for column in columns]
    sums = [cgutils.alloca_once(builder, FLOATS) for _ in places]
    for place, total in zip(places, sums, strict=True):
        builder.store(builder.load(place(FLOATS), align=4), total)
    with cgutils.for_range(builder, length) as loop:
        weights = [
            lanes(builder, _element(context, builder, b, right, loop.index, column), b.types[0].dtype)
            for b, right, column in panels
        ]
        for r, row in enumerate(rows):
            number = builder.load(_element(context, builder, a, left, row, loop.index)(F32))
            factor = splat(builder, number, FLOATS)
            for weight, total in zip(weights, sums[r * len(panels) : (r + 1) * len(panels)], strict=True):
                builder.store(math(builder, "fma", [factor, weight, builder.load(total)]), total)
    for place, total in zip(places, sums, strict=True):
        builder.store(builder.load(total), place(FLOATS), align=4)


def _tile(height: int, width: int = 1) -> Any:
    """Return an intrinsic: `height` rows of `a` times 16 x `width` lanes of `b`, with all sums in registers."""
    columns = [ir.Constant(I64, w * LANES) for w in range(width)]

    def define(typingctx, a, b, count, out):
        def codegen(context, builder, signature, values):
            left, right, length, target = values
            panels = [(b, right, column) for column in columns]
            _emit(context, builder, a, left, panels, length, out, target, height)
            return context.get_dummy_value()

        return types.void(a, b, types.intp, out), codegen

    return intrinsic(define)


def _two_tiles(height: int) -> Any:
    """Return likewise an intrinsic with 16 lanes of each of two separate panels, with adjacent results."""
    zero = ir.Constant(I64, 0)

    def define(typingctx, a, first, second, count, out):
        def codegen(context, builder, signature, values):
            left, one, two, length, target = values
            panels = [(first, one, zero), (second, two, zero)]
            _emit(context, builder, a, left, panels, length, out, target, height)
            return context.get_dummy_value()

        return types.void(a, first, second, types.intp, out), codegen

    return intrinsic(define)


_tile6, _tile4, _tile3, _tile1 = (_tile(height) for height in (6, 4, 3, 1))
_wide4, _wide3, wide_tile1 = (_tile(height, 2) for height in (4, 3, 1))
_two4, _two3, _two1 = (_two_tiles(height) for height in (4, 3, 1))

# A few rows have too few chains of additions to hide their latency: twice as many lanes have twice as many. With AVX2 a
# vector takes two registers, and there are not enough.
WIDE_ROWS = 4 if llvm.get_host_cpu_features().get("avx512f") else 0


@njit(inline="always")
def wide_rows(a, b, count, out, rows):
    """Add `rows` rows of `a`, at most WIDE_ROWS, times `count` rows of 32 lanes of `b` to rows of `out`."""
    if rows == 4:
        _wide4(a, b, count, out)
    elif rows == 3:
        _wide3(a, b, count, out)
    else:
        for r in range(rows):
            left, to = Rows(a.values, a.at + r * a.stride, a.stride), Rows(out.values, out.at + r * out.stride, 0)
            wide_tile1(left, b, count, to)


@njit(inline="always")
def two_panels(a, first, second, count, out, rows):
    """Multiply likewise with 16 lanes of each of two separate panels."""
    if rows == 4:
        _two4(a, first, second, count, out)
    elif rows == 3:
        _two3(a, first, second, count, out)
    else:
        for r in range(rows):
            left, to = Rows(a.values, a.at + r * a.stride, a.stride), Rows(out.values, out.at + r * out.stride, 0)
            _two1(left, first, second, count, to)


@njit(inline="always")
def tile_height(rows):
    """Return how many of `rows` rows to take next: 6, 4, 3 or 1. Low tiles wait for their additions, so 8 rows are 4 +
    4 rather than 6 + 1 + 1."""
    if rows >= 9 or rows == 6:
        return 6
    if rows >= 4:
        return 4
    return 3 if rows == 3 else 1


@njit(inline="always")
def tile_rows(a, b, count, out, rows):
    """Add any number of rows of `a` times `count` rows of 16 lanes of `b` to rows of `out` (all `Rows`)."""
    r = 0
    while r < rows:
        height = tile_height(rows - r)
        left, to = Rows(a.values, a.at + r * a.stride, a.stride), Rows(out.values, out.at + r * out.stride, out.stride)
        if height == 6:
            _tile6(left, b, count, to)
        elif height == 4:
            _tile4(left, b, count, to)
        elif height == 3:
            _tile3(left, b, count, to)
        else:
            _tile1(left, b, count, to)
        r += height
