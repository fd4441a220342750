"""Products of quantized weights with quantized inputs, in integers.

Inputs are quantized row by row, a block of 32 columns at a time, as llama.cpp does: to bytes where weights have
four bits, to words where they have eight. Inside a block all sums are exact integers; blocks are added in one
order, as floats. So a row's result depends on that row alone, as with float32 products, at a third of the
instructions: 32 products of bytes are one instruction where 8 of floats are.

A panel is 8 rows, a group 4 panels. Codes are stored in the order in which they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit, prange

from freehold.arrays import Float32, Int32
from freehold.engine.cpu.bytes_simd import (
    add_products,
    add_words,
    bits_of,
    float_of,
    fma_floats,
    half_at,
    high_nibbles,
    load_bytes,
    load_halves,
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
    zero_ints,
    zero_words,
)
from freehold.engine.cpu.pointwise import NO_NORM, PLAIN, ROWS_PARALLEL, prepare_row
from freehold.models.spec import StoredTensor, TensorFormat

LANES = 8  # rows of a panel
PANELS = 4
GROUP = LANES * PANELS  # rows that one task multiplies
BLOCK = 32  # columns that share a scale
X_BYTES = 96 << 10  # of inputs at a time: they should stay in L2 while all weights go by
BYTE_MAX, WORD_MAX = 127, 32767
FORMATS = (TensorFormat.Q4_0, TensorFormat.Q4_1, TensorFormat.Q8_0)


@dataclass(frozen=True)
class IntegerMatrix:
    """codes uint8: four bits [panels, blocks, 4, 8 rows, 4], where byte (j, row, i) has columns 4 j + i (low half)
    and 16 + 4 j + i of the block; or eight bits [panels, blocks, 16, 8 rows, 2]. scales, minimums uint16
    (float16, as stored) [panels, blocks, 8 rows]; no minimums with eight bits. Panels are padded to whole groups."""

    is_nibbles: bool
    rows: int
    columns: int
    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray

    @classmethod
    def pack(cls, kind: TensorFormat, data: np.ndarray, rows: int, columns: int) -> IntegerMatrix:
        """`data` uint8 [rows, bytes of a row] in one of FORMATS."""
        data = np.pad(data, ((0, -len(data) % GROUP), (0, 0)))
        blocks = columns // BLOCK
        head = {TensorFormat.Q4_0: 2, TensorFormat.Q4_1: 4, TensorFormat.Q8_0: 2}[kind]
        raw = data.reshape(len(data), blocks, -1)

        def halves(at: int) -> np.ndarray:
            values = np.ascontiguousarray(raw[:, :, at : at + 2]).view(np.uint16)[:, :, 0]
            return np.ascontiguousarray(values.reshape(-1, LANES, blocks).transpose(0, 2, 1)).ravel()

        is_nibbles = kind is not TensorFormat.Q8_0
        inner = (4, 4) if is_nibbles else (16, 2)
        codes = raw[:, :, head:].reshape(-1, LANES, blocks, *inner).transpose(0, 2, 3, 1, 4)
        scales = halves(0)
        minimums = np.zeros(0, np.uint16)
        if is_nibbles:
            implied = (scales.view(np.float16) * np.float16(-8)).view(np.uint16)  # exact: a power of two
            minimums = halves(2) if kind is TensorFormat.Q4_1 else implied
        return cls(is_nibbles, rows, columns, np.ascontiguousarray(codes).ravel(), scales, minimums)

    def multiply_add(
        self, x: Float32, out: Float32, step: int = PLAIN, norm: Float32 = NO_NORM, epsilon: float = 0.0
    ) -> None:
        """out [n, rows] += prepared(x) [n, columns] @ weight.T, all C-contiguous."""
        blocks, x, least = self.columns // BLOCK, x.ravel(), np.float32(epsilon)
        if self.is_nibbles:
            _multiply_nibbles(
                step, x, norm, least, self.codes, self.scales, self.minimums, blocks, len(out), out.ravel(), self.rows
            )
        else:
            _multiply_bytes(step, x, norm, least, self.codes, self.scales, blocks, len(out), out.ravel(), self.rows)

    def gather(self, rows: Int32) -> Float32:
        """The weights of some rows as in the file, float32 [n, columns]"""
        out = np.empty((len(rows), self.columns), np.float32)
        _gather(self.is_nibbles, self.codes, self.scales, self.minimums, self.columns // BLOCK, rows, out)
        return out


@njit(inline="always")
def _largest(x, at):
    """Of the absolute values of a block. Without their sign the bits of floats sort as integers do, and
    integers are compared eight at a time."""
    largest = np.int32(0)
    for k in range(BLOCK):
        largest = max(largest, bits_of(x[at + k]) & np.int32(0x7FFFFFFF))
    return float_of(largest)


@njit(inline="always")
def _rounded(value):
    """To the nearest integer, ties to even, for |value| < 2**22: what is added leaves no bits for fractions."""
    return np.int32((value + np.float32(12582912)) - np.float32(12582912))


@njit(inline="always")
def _quantize_row(step, x, row, norm, epsilon, blocks, limit, codes, scales, sums):
    """Prepare a row of x -> codes of at most `limit`, a scale for each block, and, if `sums` has room for them,
    scale times the sum of its codes."""
    floats = np.empty(blocks * BLOCK, np.float32)
    prepare_row(step, x, row, blocks * BLOCK, norm, epsilon, floats, 0)
    at = row * blocks * BLOCK
    for block in range(blocks):
        largest = _largest(floats, block * BLOCK)
        factor = np.float32(limit) / largest if largest > 0 else np.float32(0)
        scale = largest / np.float32(limit)
        total = np.int32(0)
        for k in range(block * BLOCK, (block + 1) * BLOCK):
            code = _rounded(floats[k] * factor)
            codes[at + k] = code
            total += code
        scales[row * blocks + block] = scale
        if len(sums):
            sums[row * blocks + block] = scale * np.float32(total)


@njit(inline="always")
def _finish(total, weight_scale, scale, result):
    """result + total * weight_scale * scale"""
    return fma_floats(total, multiply_floats(weight_scale, scale), result)


@njit(inline="always")
def _add_to(out, at, left, result, spare):
    """out[at : at + 8] += result, of which only `left` lanes may exist."""
    store_floats(spare, 0, result)
    for k in range(min(left, LANES)):
        out[at + k] += spare[k]


@njit(inline="always")
def _nibbles4(
    codes, at, scales, minimums, scale_at, blocks, x, x_at, x_scales, x_sums, xs_at, out, to, width, left, spare
):
    """Four rows of x times one panel."""
    columns = blocks * BLOCK
    r0 = r1 = r2 = r3 = splat_float(np.float32(0))
    for b in range(blocks):
        s0 = s1 = s2 = s3 = zero_words()
        for j in range(4):
            raw = load_bytes(codes, at + b * 128 + j * 32)
            low, high = low_nibbles(raw), high_nibbles(raw)
            k = x_at + b * BLOCK + 4 * j
            s0 = add_words(s0, multiply_pairs(low, splat_quad(x, k)))
            s1 = add_words(s1, multiply_pairs(low, splat_quad(x, k + columns)))
            s2 = add_words(s2, multiply_pairs(low, splat_quad(x, k + 2 * columns)))
            s3 = add_words(s3, multiply_pairs(low, splat_quad(x, k + 3 * columns)))
            s0 = add_words(s0, multiply_pairs(high, splat_quad(x, k + 16)))
            s1 = add_words(s1, multiply_pairs(high, splat_quad(x, k + columns + 16)))
            s2 = add_words(s2, multiply_pairs(high, splat_quad(x, k + 2 * columns + 16)))
            s3 = add_words(s3, multiply_pairs(high, splat_quad(x, k + 3 * columns + 16)))
        scale, minimum = load_halves(scales, scale_at + b * LANES), load_halves(minimums, scale_at + b * LANES)
        c = xs_at + b
        r0 = _finish(
            sum_pairs(s0), scale, splat_float_at(x_scales, c), fma_floats(minimum, splat_float_at(x_sums, c), r0)
        )
        c += blocks
        r1 = _finish(
            sum_pairs(s1), scale, splat_float_at(x_scales, c), fma_floats(minimum, splat_float_at(x_sums, c), r1)
        )
        c += blocks
        r2 = _finish(
            sum_pairs(s2), scale, splat_float_at(x_scales, c), fma_floats(minimum, splat_float_at(x_sums, c), r2)
        )
        c += blocks
        r3 = _finish(
            sum_pairs(s3), scale, splat_float_at(x_scales, c), fma_floats(minimum, splat_float_at(x_sums, c), r3)
        )
    _add_to(out, to, left, r0, spare)
    _add_to(out, to + width, left, r1, spare)
    _add_to(out, to + 2 * width, left, r2, spare)
    _add_to(out, to + 3 * width, left, r3, spare)


@njit(inline="always")
def _nibbles1(codes, at, scales, minimums, scale_at, blocks, x, x_at, x_scales, x_sums, xs_at, out, to, left, spare):
    """One row of x times the four panels of a group."""
    r0 = r1 = r2 = r3 = splat_float(np.float32(0))
    for b in range(blocks):
        s0 = s1 = s2 = s3 = zero_words()
        for j in range(4):
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
        x_scale, x_sum = splat_float_at(x_scales, xs_at + b), splat_float_at(x_sums, xs_at + b)
        c, step = scale_at + b * LANES, blocks * LANES
        r0 = _finish(sum_pairs(s0), load_halves(scales, c), x_scale, fma_floats(load_halves(minimums, c), x_sum, r0))
        c += step
        r1 = _finish(sum_pairs(s1), load_halves(scales, c), x_scale, fma_floats(load_halves(minimums, c), x_sum, r1))
        c += step
        r2 = _finish(sum_pairs(s2), load_halves(scales, c), x_scale, fma_floats(load_halves(minimums, c), x_sum, r2))
        c += step
        r3 = _finish(sum_pairs(s3), load_halves(scales, c), x_scale, fma_floats(load_halves(minimums, c), x_sum, r3))
    _add_to(out, to, left, r0, spare)
    _add_to(out, to + LANES, left - LANES, r1, spare)
    _add_to(out, to + 2 * LANES, left - 2 * LANES, r2, spare)
    _add_to(out, to + 3 * LANES, left - 3 * LANES, r3, spare)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _multiply_nibbles(step, source, norm, epsilon, codes, scales, minimums, blocks, count, out, width):
    """out [count, width] += prepared source @ weight.T"""
    x, x_scales = np.empty(count * blocks * BLOCK, np.int8), np.empty(count * blocks, np.float32)
    x_sums = np.empty(count * blocks, np.float32)
    if count < ROWS_PARALLEL:
        for row in range(count):
            _quantize_row(step, source, row, norm, epsilon, blocks, BYTE_MAX, x, x_scales, x_sums)
    else:
        for row in prange(count):
            _quantize_row(step, source, row, norm, epsilon, blocks, BYTE_MAX, x, x_scales, x_sums)
    together = max(X_BYTES // (blocks * BLOCK) // 4 * 4, 4)
    for first in range(0, count, together):
        last = min(first + together, count)
        for group in prange((width + GROUP - 1) // GROUP):
            spare = np.empty(LANES, np.float32)
            at, scale_at, to = group * blocks * GROUP * 16, group * blocks * GROUP, group * GROUP
            fours = last - (last - first) % 4
            for panel in range(PANELS):
                left = width - to - panel * LANES
                for row in range(first, fours if left > 0 else 0, 4):
                    _nibbles4(
                        codes, at + panel * blocks * 128, scales, minimums, scale_at + panel * blocks * LANES, blocks,
                        x, row * blocks * BLOCK, x_scales, x_sums, row * blocks,
                        out, row * width + to + panel * LANES, width, left, spare,
                    )  # fmt: skip
            for row in range(fours, last):
                _nibbles1(
                    codes, at, scales, minimums, scale_at, blocks, x, row * blocks * BLOCK, x_scales, x_sums,
                    row * blocks, out, row * width + to, width - to, spare,
                )  # fmt: skip


@njit(inline="always")
def _bytes4(codes, at, scales, scale_at, blocks, x, x_at, x_scales, xs_at, out, to, width, left, spare):
    """Four rows of x times one panel."""
    columns = blocks * BLOCK
    r0 = r1 = r2 = r3 = splat_float(np.float32(0))
    for b in range(blocks):
        s0 = s1 = s2 = s3 = zero_ints()
        for j in range(16):
            w = load_words(codes, at + b * 256 + j * 16)
            k = x_at + b * BLOCK + 2 * j
            s0 = add_products(s0, w, splat_pair(x, k))
            s1 = add_products(s1, w, splat_pair(x, k + columns))
            s2 = add_products(s2, w, splat_pair(x, k + 2 * columns))
            s3 = add_products(s3, w, splat_pair(x, k + 3 * columns))
        scale, c = load_halves(scales, scale_at + b * LANES), xs_at + b
        r0 = _finish(to_floats(s0), scale, splat_float_at(x_scales, c), r0)
        r1 = _finish(to_floats(s1), scale, splat_float_at(x_scales, c + blocks), r1)
        r2 = _finish(to_floats(s2), scale, splat_float_at(x_scales, c + 2 * blocks), r2)
        r3 = _finish(to_floats(s3), scale, splat_float_at(x_scales, c + 3 * blocks), r3)
    _add_to(out, to, left, r0, spare)
    _add_to(out, to + width, left, r1, spare)
    _add_to(out, to + 2 * width, left, r2, spare)
    _add_to(out, to + 3 * width, left, r3, spare)


@njit(inline="always")
def _bytes1(codes, at, scales, scale_at, blocks, x, x_at, x_scales, xs_at, out, to, left, spare):
    """One row of x times the four panels of a group."""
    r0 = r1 = r2 = r3 = splat_float(np.float32(0))
    for b in range(blocks):
        s0 = s1 = s2 = s3 = zero_ints()
        for j in range(16):
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
    _add_to(out, to, left, r0, spare)
    _add_to(out, to + LANES, left - LANES, r1, spare)
    _add_to(out, to + 2 * LANES, left - 2 * LANES, r2, spare)
    _add_to(out, to + 3 * LANES, left - 3 * LANES, r3, spare)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _multiply_bytes(step, source, norm, epsilon, codes, scales, blocks, count, out, width):
    """out [count, width] += prepared source @ weight.T"""
    x, x_scales = np.empty(count * blocks * BLOCK, np.int16), np.empty(count * blocks, np.float32)
    no_sums = np.empty(0, np.float32)
    for row in prange(count):
        _quantize_row(step, source, row, norm, epsilon, blocks, WORD_MAX, x, x_scales, no_sums)
    together = max(X_BYTES // (2 * blocks * BLOCK) // 4 * 4, 4)
    for first in range(0, count, together):
        last = min(first + together, count)
        for group in prange((width + GROUP - 1) // GROUP):
            spare = np.empty(LANES, np.float32)
            at, scale_at, to = group * blocks * GROUP * 32, group * blocks * GROUP, group * GROUP
            fours = last - (last - first) % 4
            for panel in range(PANELS):
                left = width - to - panel * LANES
                for row in range(first, fours if left > 0 else 0, 4):
                    _bytes4(
                        codes, at + panel * blocks * 256, scales, scale_at + panel * blocks * LANES, blocks,
                        x, row * blocks * BLOCK, x_scales, row * blocks,
                        out, row * width + to + panel * LANES, width, left, spare,
                    )  # fmt: skip
            for row in range(fours, last):
                _bytes1(
                    codes, at, scales, scale_at, blocks, x, row * blocks * BLOCK, x_scales, row * blocks,
                    out, row * width + to, width - to, spare,
                )  # fmt: skip


@njit(nogil=True, cache=True, error_model="numpy")
def _gather(is_nibbles, codes, scales, minimums, blocks, rows, out):
    for i in range(len(rows)):
        panel, row = rows[i] // LANES, rows[i] % LANES
        for b in range(blocks):
            block = panel * blocks + b
            scale = half_at(scales, block * LANES + row)
            for k in range(BLOCK):
                if is_nibbles:
                    code = codes[(block * 4 + (k % 16) // 4) * 32 + row * 4 + k % 4]
                    value = scale * np.float32(code & 15 if k < 16 else code >> 4)
                    value += half_at(minimums, block * LANES + row)
                else:
                    code = codes[(block * 16 + k // 2) * 16 + row * 2 + k % 2]
                    value = scale * np.float32(np.int8(code))
                out[i, b * BLOCK + k] = value


def can_pack(tensors: Sequence[StoredTensor]) -> bool:
    """Whether integer products are to be had for one matrix of these."""
    kinds = {tensor.format for tensor in tensors}
    return len(kinds) == 1 and kinds <= set(FORMATS) and tensors[0].columns % BLOCK == 0
