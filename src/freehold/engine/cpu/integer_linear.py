"""Products of quantized weights with quantized inputs, in integers.

Inputs are quantized row by row in blocks of 32 columns: to 16 bits, whose error is below that of the weights, or, for
weights of four bits, to 8 bits, as in llama.cpp. Sums inside a block are exact integers. Blocks are added as floats,
always in the same order. So the result of a row depends on that row alone, as with float32 products, and is the same
with every instruction set (`isa.py`).

A panel has as many rows as the instruction set has lanes, a group 32 rows. Codes are stored in the order in which they
are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit, prange

from freehold.arrays import Float32, Int32
from freehold.engine.cpu.integer_tiles import (
    BLOCK,
    GROUP,
    ORDER,
    ROWS,
    Inputs,
    Outputs,
    Weights,
    four_rows,
    one_row,
)
from freehold.engine.cpu.isa import Isa
from freehold.engine.cpu.pointwise import NO_NORM, PLAIN, ROWS_PARALLEL, Preparation, prepare_row
from freehold.engine.cpu.simd import bits_of, float_of, half_at
from freehold.models.tensor import StoredTensor, TensorFormat

X_BYTES = 96 << 10  # of inputs at a time: they should stay in L2 while all weights go by
FORMATS = (TensorFormat.Q4_0, TensorFormat.Q4_1, TensorFormat.Q8_0)


@dataclass(frozen=True)
class IntegerMatrix:
    """codes: four bits uint8 [panels, blocks, 4, lanes, 4], where byte (j, lane, i) has columns 4 j + i (low half) and
    16 + 4 j + i of the block; or eight bits int8 [panels, blocks, 16, lanes, 2]. scales, minimums uint16 (float16, as
    stored) [panels, blocks, lanes]; no minimums with eight bits. Panels are padded to whole groups. `inputs` are
    quantized to int8 or int16."""

    rows: int
    columns: int
    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray
    inputs: type[np.signedinteger]
    isa: Isa

    @classmethod
    def pack(cls, kind: TensorFormat, data: np.ndarray, columns: int, inputs: str, isa: Isa) -> IntegerMatrix:
        """`data` uint8 [rows, bytes of a row] in one of FORMATS. `inputs` of int8 are for weights of four bits:
        the others get int16."""
        rows, lanes = len(data), isa.lanes
        data = np.pad(data, ((0, -len(data) % GROUP), (0, 0)))
        blocks = columns // BLOCK
        head = {TensorFormat.Q4_0: 2, TensorFormat.Q4_1: 4, TensorFormat.Q8_0: 2}[kind]
        raw = data.reshape(len(data), blocks, -1)

        def halves(at: int) -> np.ndarray:
            values = np.ascontiguousarray(raw[:, :, at : at + 2]).view(np.uint16)[:, :, 0]
            return np.ascontiguousarray(values.reshape(-1, lanes, blocks).transpose(0, 2, 1)).ravel()

        is_nibbles = kind is not TensorFormat.Q8_0
        inner = (4, 4) if is_nibbles else (16, 2)
        packed = raw[:, :, head:].reshape(-1, lanes, blocks, *inner).transpose(0, 2, 3, 1, 4)
        codes = np.ascontiguousarray(packed).ravel()
        scales = halves(0)
        if not is_nibbles:
            return cls(rows, columns, codes.view(np.int8), scales, np.zeros(0, np.uint16), np.int16, isa)
        implied = (scales.view(np.float16) * np.float16(-8)).view(np.uint16)  # exact: a power of two
        minimums = halves(2) if kind is TensorFormat.Q4_1 else implied
        return cls(rows, columns, codes, scales, minimums, np.int8 if inputs == "int8" else np.int16, isa)

    def multiply_add(
        self, x: Float32, out: Float32, step: int = PLAIN, norm: Float32 = NO_NORM, epsilon: float = 0.0
    ) -> None:
        """out [n, rows] += prepared(x) [n, columns] @ weight.T, all C-contiguous."""
        room, loads = np.empty(len(out) * self.columns, self.inputs), 4 if len(self.minimums) else 16
        _multiply(
            step, x.ravel(), norm, np.float32(epsilon), self.codes, self.scales, self.minimums,
            room, self.columns // BLOCK, loads, len(out), out.ravel(), self.rows, self.isa,
        )  # fmt: skip

    def gather(self, rows: Int32) -> Float32:
        """The weights of some rows as in the file, float32 [n, columns]"""
        out = np.empty((len(rows), self.columns), np.float32)
        _gather(self.codes, self.scales, self.minimums, self.columns // BLOCK, rows, out, self.isa.lanes)
        return out


@njit(inline="always")
def _largest(x, at):
    """The largest absolute value of a block. Floats without their sign bit are ordered like integers, and integers are
    compared eight at a time."""
    largest = np.int32(0)
    for k in range(BLOCK):
        largest = max(largest, bits_of(x[at + k]) & np.int32(0x7FFFFFFF))
    return float_of(largest)


@njit(inline="always")
def _rounded(value):
    """Round to the nearest integer, ties to even, for |value| < 2**22. Adding 1.5 * 2**23 leaves no bits for a
    fraction."""
    return np.int32((value + np.float32(12582912)) - np.float32(12582912))


@njit(inline="always")
def _place(row, count):
    """Where the blocks of a row are stored: the first row of its tile, its position in the tile, and the rows of the
    tile. The four rows of a tile are multiplied together, and are contiguous in memory."""
    if row < count - count % ROWS:
        return row - row % ROWS, row % ROWS, ROWS
    return row, 0, 1


# Not inlined: Numba takes assignments to arrays in records for dead code where it looks into parallel loops.
@njit(nogil=True, error_model="numpy")
def _quantize_row(preparation, x, row, count, blocks, order, inputs):
    """Prepare a row of x -> `inputs`; in each block codes are stored in this order."""
    floats = np.empty(blocks * BLOCK, np.float32)
    prepare_row(preparation, x, row, blocks * BLOCK, floats, 0)
    limit = np.float32((1 << (8 * inputs.codes.itemsize - 1)) - 1)
    first, side, beside = _place(np.int64(row), count)
    for block in range(blocks):
        start, at = block * BLOCK, first * blocks + block * beside + side
        largest = _largest(floats, start)
        factor = limit / largest if largest > 0 else np.float32(0)
        total = np.int32(0)
        for k in range(BLOCK):
            code = _rounded(floats[start + order[k]] * factor)
            inputs.codes[at * BLOCK + k] = code
            total += code
        inputs.scales[at] = largest / limit
        inputs.sums[at] = largest / limit * np.float32(total)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _multiply(step, source, norm, epsilon, codes, scales, minimums, x, blocks, loads, count, out, width, isa):
    """out [count, width] += prepared source @ weight.T; `x` is room for the codes of inputs, of their type, and a
    panel's block of weights takes `loads` loads."""
    order = np.arange(BLOCK) if x.itemsize == 1 or len(minimums) == 0 else ORDER
    x_scales, x_sums = np.empty(count * blocks, np.float32), np.empty(count * blocks, np.float32)
    if count < ROWS_PARALLEL:
        for row in range(count):
            inputs, preparation = Inputs(x, x_scales, x_sums), Preparation(step, norm, epsilon)
            _quantize_row(preparation, source, row, count, blocks, order, inputs)
    else:
        for row in prange(count):
            inputs, preparation = Inputs(x, x_scales, x_sums), Preparation(step, norm, epsilon)
            _quantize_row(preparation, source, row, count, blocks, order, inputs)
    together = max(X_BYTES // (blocks * BLOCK * x.itemsize) // ROWS * ROWS, ROWS)
    for first in range(0, count, together):
        last = min(first + together, count)
        for group in prange((width + GROUP - 1) // GROUP):
            weights = Weights(codes, scales, minimums, blocks, loads, isa)
            inputs, outputs = Inputs(x, x_scales, x_sums), Outputs(out, width)
            fours = last - (last - first) % ROWS
            begin, at_once = group * GROUP // isa.lanes, 1 if isa.lanes == 8 else GROUP // 16
            for panel in range(begin, begin + GROUP // isa.lanes, at_once):
                for row in range(first, fours if panel * isa.lanes < width else 0, ROWS):
                    four_rows(weights, inputs, outputs, panel, row)
            for row in range(fours, last):
                one_row(weights, inputs, outputs, begin, row)


@njit(nogil=True, cache=True, error_model="numpy")
def _gather(codes, scales, minimums, blocks, rows, out, lanes):
    for i in range(len(rows)):
        panel, row = rows[i] // lanes, rows[i] % lanes
        for b in range(blocks):
            block = panel * blocks + b
            scale = half_at(scales, block * lanes + row)
            for k in range(BLOCK):
                if len(minimums):
                    code = codes[((block * 4 + (k % 16) // 4) * lanes + row) * 4 + k % 4]
                    value = scale * np.float32(code & 15 if k < 16 else code >> 4)
                    value += half_at(minimums, block * lanes + row)
                else:
                    code = codes[((block * 16 + k // 2) * lanes + row) * 2 + k % 2]
                    value = scale * np.float32(code)
                out[i, b * BLOCK + k] = value


def can_pack(tensors: Sequence[StoredTensor]) -> bool:
    """Whether integer products are to be had for one matrix of these."""
    kinds = {tensor.format for tensor in tensors}
    return len(kinds) == 1 and kinds <= set(FORMATS) and tensors[0].columns % BLOCK == 0
