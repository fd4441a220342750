"""Weight matrices kept in quantized form, and the product that reads each weight once a step.

A matrix [rows, columns] is divided into panels of 16 rows. A panel is stored column by column, so that one load fetches
a column of 16 weights, dequantized into lanes. The values are exactly those of the file: scale * code + minimum in
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import njit

from freehold.contract.arrays import Float32, Int32
from freehold.engine.cpu.borrowed import borrow, keep
from freehold.engine.cpu.onto import NOTHING, ONTO, Onto, outputs_of
from freehold.engine.cpu.operation import Operation, compiled, fields, given, made_once, numbers
from freehold.engine.cpu.pointwise import PLAIN, PLAINLY, Preparation
from freehold.engine.cpu.row_operations import prepare
from freehold.engine.cpu.simd import (
    fma,
    load,
    load_bf16,
    load_high_nibbles,
    load_i8,
    load_low_nibbles,
    mul,
    store,
)
from freehold.engine.cpu.tile import Rows, tile_rows, wide_tile1
from freehold.models.tensor import StoredTensor, TensorFormat

if TYPE_CHECKING:
    from freehold.engine.cpu.program import Operations

LANES = 16
BLOCK = 32  # columns that share a scale
GROUP = 2 * LANES  # rows that one task multiplies
DEPTH = 192  # columns unpacked at a time: 24 KiB, inside L1
ROWS_AT_A_TIME = 96  # inputs whose tile of outputs stays in L1

NIBBLES, BYTES, HALVES, FLOATS = range(4)  # layouts of `codes`


@dataclass(frozen=True)
class PackedMatrix:
    """codes uint8 [panels, columns, 16 lanes] in units of the layout; for the quantized layouts scales float32 [panels,
    columns / 32, 16], and minimums likewise for NIBBLES."""

    layout: int
    rows: int
    columns: int
    codes: np.ndarray
    scales: Float32
    minimums: Float32

    def multiply(
        self, operations: Operations, x: Float32, out: Float32, preparation: Preparation = PLAINLY,
        onto: Onto = NOTHING,
    ) -> None:  # fmt: skip
        """Compute out [n, rows] = onto + prepared(x) [n, columns] @ weight.T, all C-contiguous."""
        if preparation.step != PLAIN:
            x = prepare(operations, x, self.columns, preparation)
        operations.add(
            _multiplying(), -(-self.rows // GROUP), self.layout, self.codes, self.scales, self.minimums, self.columns,
            x, len(out), *onto.arguments(out), out, self.rows,
        )  # fmt: skip

    def gather(self, operations: Operations, rows: Int32) -> Float32:
        """Return some rows' weights, float32 [n, columns]."""
        out = operations.room((len(rows), self.columns))
        operations.add(
            _gathering(), len(rows), self.layout, self.codes, self.scales, self.minimums, self.columns, rows, out
        )
        return out


_NONE = np.zeros(0, np.float32)


def pack(tensors: Sequence[StoredTensor]) -> PackedMatrix:
    """Pack the rows of several tensors into one matrix; mixed formats are kept as float32."""
    columns = tensors[0].columns
    rows = sum(tensor.rows for tensor in tensors)
    if len({tensor.format for tensor in tensors}) > 1 or columns % BLOCK:
        return _pack_floats(np.concatenate([tensor.to_float32() for tensor in tensors]), rows, columns)
    kind = tensors[0].format
    data = np.concatenate([tensor.data for tensor in tensors]) if len(tensors) > 1 else tensors[0].data
    data = _pad_rows(np.ascontiguousarray(data))
    if kind in (TensorFormat.Q4_0, TensorFormat.Q4_1):
        return _pack_nibbles(data, rows, columns, has_minimum=kind is TensorFormat.Q4_1)
    if kind is TensorFormat.Q8_0:
        return _pack_bytes(data, rows, columns)
    if kind is TensorFormat.BF16:
        codes = _interleave(data.view(np.uint16))
        return PackedMatrix(HALVES, rows, columns, codes.view(np.uint8).ravel(), _NONE, _NONE)
    return _pack_floats(np.concatenate([tensor.to_float32() for tensor in tensors]), rows, columns)


def _pad_rows(data: np.ndarray) -> np.ndarray:
    extra = -len(data) % GROUP
    return np.pad(data, ((0, extra), (0, 0))) if extra else data


def _interleave(data: np.ndarray) -> np.ndarray:
    """Interleave [rows, n] -> [rows / 16, n, 16]."""
    return np.ascontiguousarray(data.reshape(-1, LANES, data.shape[1]).transpose(0, 2, 1))


def _halves(blocks: np.ndarray, at: int) -> Float32:
    """Return the float16 at byte `at` of each block [rows, blocks, bytes] -> float32 [rows / 16, blocks, 16]."""
    return _interleave(np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0].astype(np.float32))


def _pack_nibbles(data: np.ndarray, rows: int, columns: int, has_minimum: bool) -> PackedMatrix:
    """Pack Q4_1: scale, minimum, 16 bytes, whose low halves are columns 0 to 15. Q4_0 has the implied minimum -8 *
    scale."""
    head = 4 if has_minimum else 2
    blocks = data.reshape(len(data), columns // BLOCK, head + 16)
    scales = _halves(blocks, 0)
    minimums = _halves(blocks, 2) if has_minimum else scales * np.float32(-8)
    codes = _interleave(np.ascontiguousarray(blocks[:, :, head:]).reshape(len(data), -1))
    return PackedMatrix(NIBBLES, rows, columns, codes.ravel(), scales.ravel(), minimums.ravel())


def _pack_bytes(data: np.ndarray, rows: int, columns: int) -> PackedMatrix:
    """Pack Q8_0: scale, 32 signed bytes."""
    blocks = data.reshape(len(data), columns // BLOCK, 34)
    codes = _interleave(np.ascontiguousarray(blocks[:, :, 2:]).reshape(len(data), -1))
    return PackedMatrix(BYTES, rows, columns, codes.ravel(), _halves(blocks, 0).ravel(), _NONE)


def _pack_floats(values: Float32, rows: int, columns: int) -> PackedMatrix:
    codes = _interleave(_pad_rows(values)).view(np.uint8).ravel()
    return PackedMatrix(FLOATS, rows, columns, codes, _NONE, _NONE)


class _Stored(NamedTuple):
    """A `PackedMatrix` in compiled code."""

    layout: int
    columns: int
    codes: Any
    scales: Any
    minimums: Any


@njit(inline="always")
def _unpack(matrix, panel, start, count, out):
    """Unpack columns start .. start + count of a panel to float32, each a row of `out` (`Rows`)."""
    codes, values, stride = matrix.codes, out.values, out.stride
    if matrix.layout >= HALVES:
        at = (panel * matrix.columns + start) * LANES
        for k in range(count):
            if matrix.layout == HALVES:
                store(values, out.at + k * stride, load_bf16(codes, 2 * (at + k * LANES)))
            else:
                store(values, out.at + k * stride, load(codes, 4 * (at + k * LANES)))
        return
    for b in range(count // BLOCK):
        block = panel * (matrix.columns // BLOCK) + start // BLOCK + b
        to = out.at + b * BLOCK * stride
        scale = load(matrix.scales, block * LANES)
        if matrix.layout == NIBBLES:
            minimum = load(matrix.minimums, block * LANES)
            for i in range(16):
                at = (block * 16 + i) * LANES
                store(values, to + i * stride, fma(scale, load_low_nibbles(codes, at), minimum))
                store(values, to + (16 + i) * stride, fma(scale, load_high_nibbles(codes, at), minimum))
        else:
            for i in range(BLOCK):
                store(values, to + i * stride, mul(scale, load_i8(codes, (block * BLOCK + i) * LANES)))


@njit(inline="always")
def _begin_sums(outputs, sums, group, first, last):
    """Initialize the sums of rows `first` up to `last` of a group with their addends."""
    start = group * GROUP
    onto, width = numbers(outputs.onto, np.float32), min(GROUP, outputs.width - start)
    for row in range(first, last):
        at, to = row * outputs.row_step + start * outputs.column_step, (row - first) * GROUP
        for k in range(width):
            sums[to + k] = onto[at + k * outputs.column_step]


@njit(inline="always")
def _multiply_group(matrix, x, group, first, last, outputs, weights, sums):
    """Multiply rows `first` up to `last` by a group of matrix rows. `weights` and `sums` are scratch for unpacked
    weights and for a tile of outputs, which may be wider than the matrix."""
    start = group * GROUP
    width, count = min(GROUP, outputs.width - start), last - first
    _begin_sums(outputs, sums, group, first, last)
    for column in range(0, matrix.columns, DEPTH):
        depth = min(DEPTH, matrix.columns - column)
        for half in range(2):
            _unpack(matrix, 2 * group + half, column, depth, Rows(weights, half * LANES, GROUP))
        inputs = Rows(x, first * matrix.columns + column, matrix.columns)
        if count == 1:
            wide_tile1(inputs, Rows(weights, 0, GROUP), depth, Rows(sums, 0, GROUP))
            continue
        for half in range(2):
            target = Rows(sums, half * LANES, GROUP)
            tile_rows(inputs, Rows(weights, half * LANES, GROUP), depth, target, count)
    for row in range(count):
        for k in range(width):
            outputs.values[(first + row) * outputs.width + start + k] = sums[row * GROUP + k]


def _multiply(at, first, stop):
    """Multiply groups of matrix rows."""
    of = given(at)
    matrix = _Stored(
        of.layout, of.columns, numbers(of.codes, np.uint8), numbers(of.scales, np.float32),
        numbers(of.minimums, np.float32),
    )  # fmt: skip
    x, outputs = numbers(of.x, np.float32), outputs_of(of)
    weights, sums = np.empty(DEPTH * GROUP, np.float32), np.zeros(ROWS_AT_A_TIME * GROUP, np.float32)
    for group in range(first, stop):
        for row in range(0, of.count, ROWS_AT_A_TIME):
            last = min(row + ROWS_AT_A_TIME, of.count)
            _multiply_group(matrix, x, group, row, last, outputs, borrow(weights), borrow(sums))
    keep(weights)
    keep(sums)


_MULTIPLY = fields(f"layout codes scales minimums columns x count {ONTO} out width")


@made_once
def _multiplying() -> Operation:
    return compiled(_multiply, _MULTIPLY)


def _gather(at, first, stop):
    """Gather rows."""
    of = given(at)
    matrix = _Stored(
        of.layout, of.columns, numbers(of.codes, np.uint8), numbers(of.scales, np.float32),
        numbers(of.minimums, np.float32),
    )  # fmt: skip
    wanted, out = numbers(of.wanted, np.int32), numbers(of.out, np.float32)
    weights = np.empty(of.columns * LANES, np.float32)
    for i in range(first, stop):
        panel, lane = wanted[i] // LANES, wanted[i] % LANES
        _unpack(matrix, panel, 0, of.columns, Rows(borrow(weights), 0, LANES))
        for k in range(of.columns):
            out[i * of.columns + k] = weights[k * LANES + lane]
    keep(weights)


_GATHER = fields("layout codes scales minimums columns wanted out")


@made_once
def _gathering() -> Operation:
    return compiled(_gather, _GATHER)
