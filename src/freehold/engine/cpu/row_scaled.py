"""Products of weights of four bits with inputs of 16 bits, in integers from the first column to the last.

A row of weights has one unit, a float. Each block of 32 columns has a scale and a minimum that are integers of 16 bits,
in this unit: a weight is code x scale + minimum, an integer of 16 bits as well. Rounding them changes a weight by at
most 0.03 % of the largest in its row. A row of inputs has one unit, too. So the sum over a row is an integer, the same
in whatever order its terms are added: in any batch, with any tile, with every instruction set. It is rounded once.

Both factors are cut into digits for processors that multiply bytes: two signed ones (`row_scaled_amx`), or only the
inputs (`row_scaled_tiles`). A panel has as many rows as the instruction set has lanes, a group 32 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange
from numba.core import types

from freehold.arrays import Float32, Int32
from freehold.engine.cpu.amx_only import end as end_products
from freehold.engine.cpu.cache_line import LINE, aligned
from freehold.engine.cpu.codes import codes_of, joined
from freehold.engine.cpu.integer_linear import X_BYTES, Order, nibbles, place, tiled_rows
from freehold.engine.cpu.integer_tiles import BLOCK, GROUP, NIBBLE_LOADS, ROWS, Outputs, Records
from freehold.engine.cpu.isa import Isa
from freehold.engine.cpu.pointwise import NO_NORM, PLAIN, ROWS_PARALLEL, Preparation, largest_size, prepare_row
from freehold.engine.cpu.row_scaled_amx import LANES, SLAB, TILE, sixteen_rows, widen
from freehold.engine.cpu.row_scaled_amx import begin as begin_products
from freehold.engine.cpu.row_scaled_tiles import (
    DIGITS,
    Inputs,
    Weights,
    four_rows,
    one_row,
)
from freehold.engine.cpu.simd import FLOATS, INTS
from freehold.engine.cpu.vectors import I8, I16, I32, constant, halves, intrinsic, math, splat
from freehold.models.tensor import StoredTensor

LARGEST = 32_639  # 127 x 256 + 127: two signed digits
LEAST = np.float32(1e-30)  # weights that are all below it are 0: their unit might be
TILED = 12  # how many inputs it takes for tiles of 16 rows to be faster


@dataclass(frozen=True)
class RowScaledMatrix:
    """codes four bits uint8 [panels, blocks, 4, lanes, 4], where byte (j, lane, i) has columns 4 j + i (low half) and
    16 + 4 j + i of the block; scales and minimums int16 [panels, blocks, lanes]; units float32 [panels x lanes]. Panels
    are padded to whole groups."""

    rows: int
    columns: int
    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray
    units: Float32
    isa: Isa

    @classmethod
    def pack(cls, tensors: Sequence[StoredTensor], isa: Isa) -> RowScaledMatrix:
        """One matrix of the rows of tensors that `has_four_bits`."""
        rows, columns = sum(tensor.rows for tensor in tensors), tensors[0].columns
        codes = joined([codes_of(tensor) for tensor in tensors], -rows % GROUP)
        order = Order(isa.lanes, columns // BLOCK)
        assert codes.minimums is not None
        scales, minimums = codes.scales[:, ::2], codes.minimums
        largest = np.maximum(np.abs(minimums), np.abs(minimums + 15 * scales)).max(axis=1)
        # What codes of 15 times a rounded scale may be more has room, too.
        units = np.where(largest > LEAST, largest / np.float32(LARGEST - 8), np.float32(1)).astype(np.float32)
        scales, minimums = (
            order.of_numbers(np.rint(values / units[:, None]).astype(np.int16)) for values in (scales, minimums)
        )
        return cls(rows, columns, order.of_codes(nibbles(codes), NIBBLE_LOADS, 4), scales, minimums, units, isa)

    def multiply_add(
        self, x: Float32, out: Float32, step: int = PLAIN, norm: Float32 = NO_NORM, epsilon: float = 0.0
    ) -> None:
        """out [n, rows] += prepared(x) [n, columns] @ weight.T, all C-contiguous."""
        _multiply(
            step, x.ravel(), norm, np.float32(epsilon), self.codes, self.scales, self.minimums, self.units,
            self.columns // BLOCK, NIBBLE_LOADS, len(out), out.ravel(), self.rows, self.isa,
        )  # fmt: skip

    def gather(self, rows: Int32) -> Float32:
        """The weights of some rows as they are multiplied, float32 [n, columns]"""
        lanes, blocks = self.isa.lanes, self.columns // BLOCK
        panel, lane = rows // lanes, rows % lanes
        codes = Order(lanes, blocks).nibbles_of(self.codes, rows)
        scales, minimums = (
            values.reshape(-1, blocks, lanes)[panel, :, lane][:, :, None].astype(np.int32)
            for values in (self.scales, self.minimums)
        )
        return (codes * scales + minimums).reshape(len(rows), -1) * self.units[rows][:, None]


# -- inputs -------------------------------------------------------------------------------------------


class _Emitter(Records):
    """Emits: BLOCK floats from `at`, times a factor, become digits, the lower ones from `to` on, the upper ones `apart`
    bytes behind, and the sum of the codes is number `number`."""

    def emit(self) -> None:
        builder = self.builder
        _, at, factor, _, number, to, apart = self.values
        factors = splat(builder, factor, FLOATS)
        parts = [builder.load(self.array(0, self.linear(at, half), FLOATS), align=4) for half in (0, 16)]
        codes = [builder.fptosi(math(builder, "rint", [builder.fmul(part, factors)]), INTS) for part in parts]
        builder.store(halves(builder, builder.add(*codes), builder.add), self.at(3, 2, number, I32))
        wide, words, bytes_ = (ir.VectorType(kind, BLOCK) for kind in (I32, I16, I8))
        together = builder.shuffle_vector(*codes, ir.Constant(wide, list(range(BLOCK))))
        low = builder.trunc(together, words)
        high = builder.lshr(builder.add(low, constant(words, 128)), constant(words, 8))
        for digit, values in enumerate((low, high)):
            place = self.at(3, 0, self.linear(to, (apart, digit)), bytes_)
            builder.store(builder.trunc(values, bytes_), place, align=1)


def _define_digits(typingctx, floats, at, factor, inputs, number, to, apart):
    def codegen(context, builder, signature, values):
        _Emitter(context, builder, signature, values).emit()
        return context.get_dummy_value()

    return types.void(floats, types.intp, types.float32, inputs, types.intp, types.intp, types.intp), codegen


_put_digits: Any = intrinsic(_define_digits)


@njit(inline="always")
def _row_bytes(blocks):
    return (blocks + 1) // 2 * 2 * BLOCK * DIGITS


# Not inlined: Numba takes assignments to arrays in records for dead code where it looks into parallel loops.
@njit(nogil=True, error_model="numpy")
def _quantize_row(preparation, x, row, count, tiled, blocks, inputs):
    """Prepare a row of x -> `inputs`. A tile of 16 rows is stored as [pairs of blocks, digits, 16, 64], a smaller one
    as [blocks, digits, rows, 32]."""
    floats = np.empty(blocks * BLOCK, np.float32)
    prepare_row(preparation, x, row, blocks * BLOCK, floats, 0)
    largest = largest_size(floats, 0, blocks * BLOCK)
    factor = np.float32(LARGEST) / largest if largest > 0 else np.float32(0)
    inputs.units[row] = largest / np.float32(LARGEST)
    first, side, beside = place(np.int64(row), count, tiled)
    start = first * _row_bytes(blocks)
    for block in range(blocks):
        number = first * blocks + block * beside + side
        if beside == TILE:
            to = start + block // 2 * DIGITS * SLAB + side * 2 * BLOCK + block % 2 * BLOCK
            _put_digits(floats, block * BLOCK, factor, inputs, number, to, SLAB)
        else:
            to = start + (block * DIGITS * beside + side) * BLOCK
            _put_digits(floats, block * BLOCK, factor, inputs, number, to, beside * BLOCK)


# -- products -----------------------------------------------------------------------------------------


@njit(nogil=True, error_model="numpy")
def _multiply_tiles(weights, inputs, outputs, group, count):
    """The first `count` rows, which are in tiles, times a group of weights."""
    size, first = (weights.blocks + 1) // 2 * DIGITS * SLAB, group * GROUP // LANES
    panels = min(GROUP // LANES, (outputs.width - first * LANES + LANES - 1) // LANES)
    room = aligned(np.empty(GROUP // LANES * size + LINE, np.int8))
    begin_products(weights)
    for panel in range(panels):
        widen(weights, first + panel, room[panel * size :])
    for row in range(0, count, TILE):
        for panel in range(panels):
            sixteen_rows(weights, inputs, outputs, room[panel * size :], first + panel, row, min(TILE, count - row))
    end_products(weights)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _multiply(step, source, norm, epsilon, codes, scales, minimums, units, blocks, loads, count, out, width, isa):
    """out [count, width] += prepared source @ weight.T"""
    tiled = tiled_rows(count, isa.tile, TILED)
    rows = max(count, tiled)
    x = aligned(np.empty(rows * _row_bytes(blocks) + LINE, np.int8))
    x_units, x_sums = np.empty(rows, np.float32), np.empty(rows * blocks, np.int32)
    if count < ROWS_PARALLEL:
        for row in range(count):
            inputs, preparation = Inputs(x, x_units, x_sums), Preparation(step, norm, epsilon)
            _quantize_row(preparation, source, row, count, tiled, blocks, inputs)
    else:
        for row in prange(count):
            inputs, preparation = Inputs(x, x_units, x_sums), Preparation(step, norm, epsilon)
            _quantize_row(preparation, source, row, count, tiled, blocks, inputs)
    together = max(X_BYTES // _row_bytes(blocks) // TILE * TILE, TILE)
    groups = (width + GROUP - 1) // GROUP
    for group in prange(min(tiled, 1) * groups):
        weights = Weights(codes, scales, minimums, units, blocks, loads, isa)
        inputs, outputs = Inputs(x, x_units, x_sums), Outputs(out, width)
        _multiply_tiles(weights, inputs, outputs, group, min(count, tiled))
    for first in range(min(tiled, count), count, together):
        last = min(first + together, count)
        for group in prange(groups):
            weights = Weights(codes, scales, minimums, units, blocks, loads, isa)
            inputs, outputs = Inputs(x, x_units, x_sums), Outputs(out, width)
            fours = last - (last - first) % ROWS
            for panel in range(group * GROUP // isa.lanes, (group + 1) * GROUP // isa.lanes):
                end = last if panel * isa.lanes < width else 0
                for row in range(first, min(fours, end), ROWS):
                    four_rows(weights, inputs, outputs, panel, row)
                for row in range(fours, end):
                    one_row(weights, inputs, outputs, panel, row)
