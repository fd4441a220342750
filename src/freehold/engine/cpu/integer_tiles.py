"""One or four rows of inputs times a panel or a group of weights: the inner loops of `integer_linear`.

`codes`, `scales` and `minimums` are laid out as in `IntegerMatrix`. Results are added to `out`, of which only `left`
rows of weights exist. A panel's block takes `loads` loads: the compiler must not know how many, for where it unrolls
that loop it keeps more than there are registers.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import overload

from freehold.engine.cpu.bytes_simd import (
    add_products,
    add_words,
    fma_floats,
    high_nibbles,
    load_bytes,
    load_floats,
    load_halves,
    load_raw_words,
    load_words,
    low_nibbles,
    multiply_floats,
    multiply_pairs,
    splat_float,
    splat_float_at,
    splat_pair,
    splat_quad,
    store_floats,
    sum_pairs,
    to_floats,
    word_nibbles,
    zero_ints,
    zero_words,
)

LANES = 8  # rows of a panel
BLOCK = 32  # columns that share a scale
ROWS = 4  # of inputs, whose blocks stand side by side
# In which words of a block are kept for weights of four bits: those that meet in one instruction stand together.
ORDER = np.array([16 * (t % 2) + 4 * j + t // 2 + 2 * i for j in range(4) for t in range(4) for i in range(2)])


@njit(inline="always")
def _finish(total, weight_scale, scale, result):
    """result + total * weight_scale * scale"""
    return fma_floats(total, multiply_floats(weight_scale, scale), result)


@njit(inline="always")
def _add_block(result, total, scales, minimums, at, x_scales, x_sums, x_at):
    """result + total x both scales + the block's minimum x the sum of its inputs"""
    result = fma_floats(load_halves(minimums, at), splat_float_at(x_sums, x_at), result)
    return _finish(total, load_halves(scales, at), splat_float_at(x_scales, x_at), result)


@njit(inline="always")
def _add_to(out, at, left, result, spare):
    """out[at : at + 8] += result, of which only `left` lanes may exist."""
    if left >= LANES:
        store_floats(out, at, fma_floats(result, splat_float(np.float32(1)), load_floats(out, at)))
    else:
        store_floats(spare, 0, result)
        for k in range(left):
            out[at + k] += spare[k]


@njit(inline="always")
def _add_rows(out, to, width, left, r0, r1, r2, r3, spare):
    """Four rows of inputs have met one panel."""
    _add_to(out, to, left, r0, spare)
    _add_to(out, to + width, left, r1, spare)
    _add_to(out, to + 2 * width, left, r2, spare)
    _add_to(out, to + 3 * width, left, r3, spare)


@njit(inline="always")
def _add_panels(out, to, left, r0, r1, r2, r3, spare):
    """One row of inputs has met four panels."""
    _add_to(out, to, left, r0, spare)
    _add_to(out, to + LANES, left - LANES, r1, spare)
    _add_to(out, to + 2 * LANES, left - 2 * LANES, r2, spare)
    _add_to(out, to + 3 * LANES, left - 3 * LANES, r3, spare)


def _nibbles_bytes4(
    codes, at, scales, minimums, scale_at, blocks, loads, x, x_at, x_scales, x_sums, xs_at, out, to, width, left, spare
):
    """Four rows of x times one panel."""
    r0 = r1 = r2 = r3 = splat_float(np.float32(0))
    for b in range(blocks):
        s0 = s1 = s2 = s3 = zero_words()
        for j in range(loads):
            raw = load_bytes(codes, at + b * 128 + j * 32)
            low, high = low_nibbles(raw), high_nibbles(raw)
            k = x_at + b * ROWS * BLOCK + 4 * j
            s0 = add_words(s0, multiply_pairs(low, splat_quad(x, k)))
            s1 = add_words(s1, multiply_pairs(low, splat_quad(x, k + BLOCK)))
            s2 = add_words(s2, multiply_pairs(low, splat_quad(x, k + 2 * BLOCK)))
            s3 = add_words(s3, multiply_pairs(low, splat_quad(x, k + 3 * BLOCK)))
            s0 = add_words(s0, multiply_pairs(high, splat_quad(x, k + 16)))
            s1 = add_words(s1, multiply_pairs(high, splat_quad(x, k + BLOCK + 16)))
            s2 = add_words(s2, multiply_pairs(high, splat_quad(x, k + 2 * BLOCK + 16)))
            s3 = add_words(s3, multiply_pairs(high, splat_quad(x, k + 3 * BLOCK + 16)))
        w, c = scale_at + b * LANES, xs_at + b * ROWS
        r0 = _add_block(r0, sum_pairs(s0), scales, minimums, w, x_scales, x_sums, c)
        r1 = _add_block(r1, sum_pairs(s1), scales, minimums, w, x_scales, x_sums, c + 1)
        r2 = _add_block(r2, sum_pairs(s2), scales, minimums, w, x_scales, x_sums, c + 2)
        r3 = _add_block(r3, sum_pairs(s3), scales, minimums, w, x_scales, x_sums, c + 3)
    _add_rows(out, to, width, left, r0, r1, r2, r3, spare)


def _nibbles_bytes1(
    codes, at, scales, minimums, scale_at, blocks, loads, x, x_at, x_scales, x_sums, xs_at, out, to, left, spare
):
    """One row of x times the four panels of a group."""
    r0 = r1 = r2 = r3 = splat_float(np.float32(0))
    for b in range(blocks):
        s0 = s1 = s2 = s3 = zero_words()
        for j in range(loads):
            base = at + b * 128 + j * 32
            k = x_at + b * BLOCK + 4 * j
            low, high = splat_quad(x, k), splat_quad(x, k + 16)
            w0, w1 = load_bytes(codes, base), load_bytes(codes, base + blocks * 128)
            w2, w3 = load_bytes(codes, base + blocks * 256), load_bytes(codes, base + blocks * 384)
            s0 = add_words(s0, multiply_pairs(low_nibbles(w0), low))
            s1 = add_words(s1, multiply_pairs(low_nibbles(w1), low))
            s2 = add_words(s2, multiply_pairs(low_nibbles(w2), low))
            s3 = add_words(s3, multiply_pairs(low_nibbles(w3), low))
            s0 = add_words(s0, multiply_pairs(high_nibbles(w0), high))
            s1 = add_words(s1, multiply_pairs(high_nibbles(w1), high))
            s2 = add_words(s2, multiply_pairs(high_nibbles(w2), high))
            s3 = add_words(s3, multiply_pairs(high_nibbles(w3), high))
        w, c, step = scale_at + b * LANES, xs_at + b, blocks * LANES
        r0 = _add_block(r0, sum_pairs(s0), scales, minimums, w, x_scales, x_sums, c)
        r1 = _add_block(r1, sum_pairs(s1), scales, minimums, w + step, x_scales, x_sums, c)
        r2 = _add_block(r2, sum_pairs(s2), scales, minimums, w + 2 * step, x_scales, x_sums, c)
        r3 = _add_block(r3, sum_pairs(s3), scales, minimums, w + 3 * step, x_scales, x_sums, c)
    _add_panels(out, to, left, r0, r1, r2, r3, spare)


def _nibbles_words4(
    codes, at, scales, minimums, scale_at, blocks, loads, x, x_at, x_scales, x_sums, xs_at, out, to, width, left, spare
):
    """Four rows of words, in the order of `ORDER`, times one panel."""
    r0 = r1 = r2 = r3 = splat_float(np.float32(0))
    for b in range(blocks):
        s0 = s1 = s2 = s3 = zero_ints()
        for j in range(loads):
            raw = load_raw_words(codes, at + b * 128 + j * 32)
            k = x_at + b * ROWS * BLOCK + 8 * j
            w = word_nibbles(raw, 0)
            s0 = add_products(s0, w, splat_pair(x, k))
            s1 = add_products(s1, w, splat_pair(x, k + BLOCK))
            s2 = add_products(s2, w, splat_pair(x, k + 2 * BLOCK))
            s3 = add_products(s3, w, splat_pair(x, k + 3 * BLOCK))
            w = word_nibbles(raw, 4)
            s0 = add_products(s0, w, splat_pair(x, k + 2))
            s1 = add_products(s1, w, splat_pair(x, k + 2 + BLOCK))
            s2 = add_products(s2, w, splat_pair(x, k + 2 + 2 * BLOCK))
            s3 = add_products(s3, w, splat_pair(x, k + 2 + 3 * BLOCK))
            w = word_nibbles(raw, 8)
            s0 = add_products(s0, w, splat_pair(x, k + 4))
            s1 = add_products(s1, w, splat_pair(x, k + 4 + BLOCK))
            s2 = add_products(s2, w, splat_pair(x, k + 4 + 2 * BLOCK))
            s3 = add_products(s3, w, splat_pair(x, k + 4 + 3 * BLOCK))
            w = word_nibbles(raw, 12)
            s0 = add_products(s0, w, splat_pair(x, k + 6))
            s1 = add_products(s1, w, splat_pair(x, k + 6 + BLOCK))
            s2 = add_products(s2, w, splat_pair(x, k + 6 + 2 * BLOCK))
            s3 = add_products(s3, w, splat_pair(x, k + 6 + 3 * BLOCK))
        w, c = scale_at + b * LANES, xs_at + b * ROWS
        r0 = _add_block(r0, to_floats(s0), scales, minimums, w, x_scales, x_sums, c)
        r1 = _add_block(r1, to_floats(s1), scales, minimums, w, x_scales, x_sums, c + 1)
        r2 = _add_block(r2, to_floats(s2), scales, minimums, w, x_scales, x_sums, c + 2)
        r3 = _add_block(r3, to_floats(s3), scales, minimums, w, x_scales, x_sums, c + 3)
    _add_rows(out, to, width, left, r0, r1, r2, r3, spare)


def _nibbles_words1(
    codes, at, scales, minimums, scale_at, blocks, loads, x, x_at, x_scales, x_sums, xs_at, out, to, left, spare
):
    """One row of words, in the order of `ORDER`, times the four panels of a group."""
    r0 = r1 = r2 = r3 = splat_float(np.float32(0))
    for b in range(blocks):
        s0 = s1 = s2 = s3 = zero_ints()
        for j in range(loads):
            base, k = at + b * 128 + j * 32, x_at + b * BLOCK + 8 * j
            x0, x1, x2, x3 = splat_pair(x, k), splat_pair(x, k + 2), splat_pair(x, k + 4), splat_pair(x, k + 6)
            raw = load_raw_words(codes, base)
            s0 = add_products(s0, word_nibbles(raw, 0), x0)
            s0 = add_products(s0, word_nibbles(raw, 4), x1)
            s0 = add_products(s0, word_nibbles(raw, 8), x2)
            s0 = add_products(s0, word_nibbles(raw, 12), x3)
            raw = load_raw_words(codes, base + blocks * 128)
            s1 = add_products(s1, word_nibbles(raw, 0), x0)
            s1 = add_products(s1, word_nibbles(raw, 4), x1)
            s1 = add_products(s1, word_nibbles(raw, 8), x2)
            s1 = add_products(s1, word_nibbles(raw, 12), x3)
            raw = load_raw_words(codes, base + blocks * 256)
            s2 = add_products(s2, word_nibbles(raw, 0), x0)
            s2 = add_products(s2, word_nibbles(raw, 4), x1)
            s2 = add_products(s2, word_nibbles(raw, 8), x2)
            s2 = add_products(s2, word_nibbles(raw, 12), x3)
            raw = load_raw_words(codes, base + blocks * 384)
            s3 = add_products(s3, word_nibbles(raw, 0), x0)
            s3 = add_products(s3, word_nibbles(raw, 4), x1)
            s3 = add_products(s3, word_nibbles(raw, 8), x2)
            s3 = add_products(s3, word_nibbles(raw, 12), x3)
        w, c, step = scale_at + b * LANES, xs_at + b, blocks * LANES
        r0 = _add_block(r0, to_floats(s0), scales, minimums, w, x_scales, x_sums, c)
        r1 = _add_block(r1, to_floats(s1), scales, minimums, w + step, x_scales, x_sums, c)
        r2 = _add_block(r2, to_floats(s2), scales, minimums, w + 2 * step, x_scales, x_sums, c)
        r3 = _add_block(r3, to_floats(s3), scales, minimums, w + 3 * step, x_scales, x_sums, c)
    _add_panels(out, to, left, r0, r1, r2, r3, spare)


def _bytes_words4(
    codes, at, scales, minimums, scale_at, blocks, loads, x, x_at, x_scales, x_sums, xs_at, out, to, width, left, spare
):
    """Four rows of x times one panel."""
    r0 = r1 = r2 = r3 = splat_float(np.float32(0))
    for b in range(blocks):
        s0 = s1 = s2 = s3 = zero_ints()
        for j in range(loads):
            w = load_words(codes, at + b * 256 + j * 16)
            k = x_at + b * ROWS * BLOCK + 2 * j
            s0 = add_products(s0, w, splat_pair(x, k))
            s1 = add_products(s1, w, splat_pair(x, k + BLOCK))
            s2 = add_products(s2, w, splat_pair(x, k + 2 * BLOCK))
            s3 = add_products(s3, w, splat_pair(x, k + 3 * BLOCK))
        scale, c = load_halves(scales, scale_at + b * LANES), xs_at + b * ROWS
        r0 = _finish(to_floats(s0), scale, splat_float_at(x_scales, c), r0)
        r1 = _finish(to_floats(s1), scale, splat_float_at(x_scales, c + 1), r1)
        r2 = _finish(to_floats(s2), scale, splat_float_at(x_scales, c + 2), r2)
        r3 = _finish(to_floats(s3), scale, splat_float_at(x_scales, c + 3), r3)
    _add_rows(out, to, width, left, r0, r1, r2, r3, spare)


def _bytes_words1(
    codes, at, scales, minimums, scale_at, blocks, loads, x, x_at, x_scales, x_sums, xs_at, out, to, left, spare
):
    """One row of x times the four panels of a group."""
    r0 = r1 = r2 = r3 = splat_float(np.float32(0))
    for b in range(blocks):
        s0 = s1 = s2 = s3 = zero_ints()
        for j in range(loads):
            base, pair = at + b * 256 + j * 16, splat_pair(x, x_at + b * BLOCK + 2 * j)
            s0 = add_products(s0, load_words(codes, base), pair)
            s1 = add_products(s1, load_words(codes, base + blocks * 256), pair)
            s2 = add_products(s2, load_words(codes, base + blocks * 512), pair)
            s3 = add_products(s3, load_words(codes, base + blocks * 768), pair)
        c, x_scale = scale_at + b * LANES, splat_float_at(x_scales, xs_at + b)
        r0 = _finish(to_floats(s0), load_halves(scales, c), x_scale, r0)
        r1 = _finish(to_floats(s1), load_halves(scales, c + blocks * LANES), x_scale, r1)
        r2 = _finish(to_floats(s2), load_halves(scales, c + 2 * blocks * LANES), x_scale, r2)
        r3 = _finish(to_floats(s3), load_halves(scales, c + 3 * blocks * LANES), x_scale, r3)
    _add_panels(out, to, left, r0, r1, r2, r3, spare)


def four_rows(*arguments):
    """Four rows of inputs times one panel, whatever both are made of."""
    raise NotImplementedError("only in compiled code")


def one_row(*arguments):
    """One row of inputs times the four panels of a group."""
    raise NotImplementedError("only in compiled code")


@overload(four_rows, inline="always")
def _four_rows(
    codes, at, scales, minimums, scale_at, blocks, loads, x, x_at, x_scales, x_sums, xs_at, out, to, width, left, spare
):
    if codes.dtype == types.int8:
        return _bytes_words4
    return _nibbles_bytes4 if x.dtype == types.int8 else _nibbles_words4


@overload(one_row, inline="always")
def _one_row(
    codes, at, scales, minimums, scale_at, blocks, loads, x, x_at, x_scales, x_sums, xs_at, out, to, left, spare
):
    if codes.dtype == types.int8:
        return _bytes_words1
    return _nibbles_bytes1 if x.dtype == types.int8 else _nibbles_words1
