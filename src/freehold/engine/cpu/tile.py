"""The inner product that linear layers and attention share.

out[r, lane] += sum over k of a[r, k] * b[k, lane], k ascending, one fused multiply-add each. Every tile
shape sums in this same order, so a row's result does not depend on how rows were grouped into tiles.
Six rows of 16 lanes keep twelve AVX2 registers busy (the shape of BLIS's Haswell kernel).
"""

from numba import njit

from freehold.engine.cpu.simd import fma, load, splat_at, store


@njit(inline="always")
def tile6(a, a_at, a_stride, b, b_at, b_stride, count, out, out_at, out_stride):
    """Six rows of `a`, 16 lanes of `b`."""
    s0 = load(out, out_at)
    s1 = load(out, out_at + out_stride)
    s2 = load(out, out_at + 2 * out_stride)
    s3 = load(out, out_at + 3 * out_stride)
    s4 = load(out, out_at + 4 * out_stride)
    s5 = load(out, out_at + 5 * out_stride)
    for k in range(count):
        w = load(b, b_at + k * b_stride)
        s0 = fma(splat_at(a, a_at + k), w, s0)
        s1 = fma(splat_at(a, a_at + a_stride + k), w, s1)
        s2 = fma(splat_at(a, a_at + 2 * a_stride + k), w, s2)
        s3 = fma(splat_at(a, a_at + 3 * a_stride + k), w, s3)
        s4 = fma(splat_at(a, a_at + 4 * a_stride + k), w, s4)
        s5 = fma(splat_at(a, a_at + 5 * a_stride + k), w, s5)
    store(out, out_at, s0)
    store(out, out_at + out_stride, s1)
    store(out, out_at + 2 * out_stride, s2)
    store(out, out_at + 3 * out_stride, s3)
    store(out, out_at + 4 * out_stride, s4)
    store(out, out_at + 5 * out_stride, s5)


@njit(inline="always")
def tile4(a, a_at, a_stride, b, b_at, b_stride, count, out, out_at, out_stride):
    """Four rows of `a`, 16 lanes of `b`."""
    s0 = load(out, out_at)
    s1 = load(out, out_at + out_stride)
    s2 = load(out, out_at + 2 * out_stride)
    s3 = load(out, out_at + 3 * out_stride)
    for k in range(count):
        w = load(b, b_at + k * b_stride)
        s0 = fma(splat_at(a, a_at + k), w, s0)
        s1 = fma(splat_at(a, a_at + a_stride + k), w, s1)
        s2 = fma(splat_at(a, a_at + 2 * a_stride + k), w, s2)
        s3 = fma(splat_at(a, a_at + 3 * a_stride + k), w, s3)
    store(out, out_at, s0)
    store(out, out_at + out_stride, s1)
    store(out, out_at + 2 * out_stride, s2)
    store(out, out_at + 3 * out_stride, s3)


@njit(inline="always")
def tile3(a, a_at, a_stride, b, b_at, b_stride, count, out, out_at, out_stride):
    """Three rows of `a`, 16 lanes of `b`."""
    s0 = load(out, out_at)
    s1 = load(out, out_at + out_stride)
    s2 = load(out, out_at + 2 * out_stride)
    for k in range(count):
        w = load(b, b_at + k * b_stride)
        s0 = fma(splat_at(a, a_at + k), w, s0)
        s1 = fma(splat_at(a, a_at + a_stride + k), w, s1)
        s2 = fma(splat_at(a, a_at + 2 * a_stride + k), w, s2)
    store(out, out_at, s0)
    store(out, out_at + out_stride, s1)
    store(out, out_at + 2 * out_stride, s2)


@njit(inline="always")
def tile1(a, a_at, b, b_at, b_stride, count, out, out_at):
    """One row of `a`, 16 lanes of `b`."""
    s0 = load(out, out_at)
    for k in range(count):
        s0 = fma(splat_at(a, a_at + k), load(b, b_at + k * b_stride), s0)
    store(out, out_at, s0)


@njit(inline="always")
def tile1_wide(a, a_at, b, b_at, b_stride, count, out, out_at):
    """One row of `a`, 32 lanes of `b`: two more chains of additions hide the latency of one row."""
    s0 = load(out, out_at)
    s1 = load(out, out_at + 16)
    for k in range(count):
        x = splat_at(a, a_at + k)
        s0 = fma(x, load(b, b_at + k * b_stride), s0)
        s1 = fma(x, load(b, b_at + k * b_stride + 16), s1)
    store(out, out_at, s0)
    store(out, out_at + 16, s1)


@njit(inline="always")
def tile_height(rows):
    """How many of `rows` rows to take next: 6, 4, 3 or 1. Low tiles wait for their additions, so 8 rows
    are 4 + 4 rather than 6 + 1 + 1."""
    if rows >= 9 or rows == 6:
        return 6
    if rows >= 4:
        return 4
    return 3 if rows == 3 else 1


@njit(inline="always")
def tile_rows(a, a_at, a_stride, b, b_at, b_stride, count, out, out_at, out_stride, rows):
    """Any number of rows, 16 lanes."""
    r = 0
    while r < rows:
        height = tile_height(rows - r)
        at, to = a_at + r * a_stride, out_at + r * out_stride
        if height == 6:
            tile6(a, at, a_stride, b, b_at, b_stride, count, out, to, out_stride)
        elif height == 4:
            tile4(a, at, a_stride, b, b_at, b_stride, count, out, to, out_stride)
        elif height == 3:
            tile3(a, at, a_stride, b, b_at, b_stride, count, out, to, out_stride)
        else:
            tile1(a, at, b, b_at, b_stride, count, out, to)
        r += height
