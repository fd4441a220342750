"""Products of quantized weights with quantized inputs, in integers.

Inputs are quantized row by row in blocks of 32 columns: to 8 bits for weights of four bits, as in llama.cpp, and to 16
bits for the others, whose error is below that of the weights. Sums inside a block are exact integers. Blocks are added
as floats, always in the same order. So the result of a row depends on that row alone, as with float32 products, and is
the same with every instruction set (`isa.py`). Weights of four bits with inputs of 16 bits are in `row_scaled`.

A panel has as many rows as the instruction set has lanes, a group 32 rows. Codes are stored in the order in which they
are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit, prange

from freehold.arrays import Float32, Int32
from freehold.engine.cpu.amx_only import end as end_products
from freehold.engine.cpu.codes import CODED, Codes, codes_of, joined
from freehold.engine.cpu.integer_amx import LANES, PANEL_BLOCK, TILE, sixteen_rows, widen
from freehold.engine.cpu.integer_amx import begin as begin_products
from freehold.engine.cpu.integer_tiles import (
    BLOCK,
    BYTE_LOADS,
    GROUP,
    NIBBLE_LOADS,
    ROWS,
    Inputs,
    Outputs,
    Weights,
    four_rows,
    one_row,
    panels_at_once,
)
from freehold.engine.cpu.isa import Isa
from freehold.engine.cpu.pointwise import NO_NORM, PLAIN, ROWS_PARALLEL, Preparation, prepare_row
from freehold.engine.cpu.quantize import quantize_block
from freehold.models.tensor import StoredTensor, TensorFormat

# How many inputs, and rows of the last tile, it takes for tiles of 16 rows to be faster: of 8 bits, of 16 bits.
TILED_BYTES, TILED_WORDS, TILE_LEAST = 128, 12, 12
X_BYTES = 96 << 10  # of inputs at a time: they should stay in L2 while all weights go by
COLUMNS_MAX = 1 << 16  # so that sums of products of bytes are integers of 32 bits
FOUR_BITS = frozenset({TensorFormat.Q4_0, TensorFormat.Q4_1, TensorFormat.Q4_K})
# One scale for 32 columns, a float16; and no minimum that float16 can't hold.
COARSE = frozenset({TensorFormat.Q4_0, TensorFormat.Q4_1, TensorFormat.Q5_0, TensorFormat.Q8_0, TensorFormat.IQ4_NL})


@dataclass(frozen=True)
class IntegerMatrix:
    """codes: four bits uint8 [panels, blocks, 4, lanes, 4], where byte (j, lane, i) has columns 4 j + i (low half) and
    16 + 4 j + i of the block; or eight bits int8 [panels, blocks, 16, lanes, 2]. Panels are padded to whole groups.

    scales uint16 (float16, as stored) [panels, blocks, lanes]. Formats with finer ones have float32: for four bits
    likewise, for eight bits [panels, blocks, 2, lanes], one for each half of a block. minimums of the same type
    [panels, blocks, lanes]; none for eight bits with scales of float16. `inputs`: what they are quantized to."""

    rows: int
    columns: int
    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray
    inputs: type[np.signedinteger]
    isa: Isa

    @classmethod
    def pack(cls, tensors: Sequence[StoredTensor], isa: Isa) -> IntegerMatrix:
        """One matrix of the rows of tensors for which `can_pack`."""
        kinds, columns = {tensor.format for tensor in tensors}, tensors[0].columns
        rows, blocks = sum(tensor.rows for tensor in tensors), columns // BLOCK
        codes = joined([codes_of(tensor) for tensor in tensors], -rows % GROUP)
        order = Order(isa.lanes, blocks)
        if has_four_bits(tensors):
            return cls(rows, columns, *_pack_nibbles(codes, order, is_coarse=kinds <= COARSE), np.int8, isa)
        is_coarse = kinds <= COARSE - FOUR_BITS
        return cls(rows, columns, *_pack_bytes(codes, order, is_coarse), np.int16, isa)

    @property
    def _loads(self) -> int:
        """Of codes that share a scale."""
        if self.codes.dtype == np.uint8:
            return NIBBLE_LOADS
        return BYTE_LOADS if self.scales.dtype == np.uint16 else BYTE_LOADS // 2

    def multiply_add(
        self, x: Float32, out: Float32, step: int = PLAIN, norm: Float32 = NO_NORM, epsilon: float = 0.0
    ) -> None:
        """out [n, rows] += prepared(x) [n, columns] @ weight.T, all C-contiguous."""
        room = np.empty((len(out) + TILE) * self.columns, self.inputs)
        _multiply(
            step, x.ravel(), norm, np.float32(epsilon), self.codes, self.scales, self.minimums,
            room, self.columns // BLOCK, self._loads, len(out), out.ravel(), self.rows, self.isa,
        )  # fmt: skip

    def gather(self, rows: Int32) -> Float32:
        """The weights of some rows as in the file, float32 [n, columns]"""
        lanes, blocks = self.isa.lanes, self.columns // BLOCK
        panel, lane = rows // lanes, rows % lanes

        def spread(values: np.ndarray, halves: int) -> Float32:
            """[panels, blocks, halves, lanes] -> [n, columns]"""
            numbers = values.view(np.float16) if values.dtype == np.uint16 else values
            found = numbers.reshape(-1, blocks, halves, lanes)[panel, :, :, lane].astype(np.float32)
            return np.repeat(found.reshape(len(rows), -1), BLOCK // halves, axis=1)

        if self.codes.dtype == np.uint8:
            codes = Order(lanes, blocks).nibbles_of(self.codes, rows)
        else:
            codes = self.codes.reshape(-1, blocks, 16, lanes, 2)[panel, :, :, lane]
        halves = 2 if self._loads == BYTE_LOADS // 2 else 1
        out = spread(self.scales, halves) * codes.reshape(len(rows), -1)
        return out + spread(self.minimums, 1) if len(self.minimums) else out


class Order(NamedTuple):
    """The order in which a matrix is read: panel by panel, block by block."""

    lanes: int
    blocks: int

    def of_codes(self, codes: np.ndarray, steps: int, beside: int) -> np.ndarray:
        """[rows, columns of bytes] -> [panels, blocks, steps, lanes, beside], flat."""
        split = codes.reshape(-1, self.lanes, self.blocks, steps, beside)
        return np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4)).ravel()

    def nibbles_of(self, codes: np.ndarray, rows: Int32) -> np.ndarray:
        """Codes of four bits of some rows [n, blocks, 32], from those of a matrix in this order."""
        ordered = codes.reshape(-1, self.blocks, NIBBLE_LOADS, self.lanes, 4)
        packed = ordered[rows // self.lanes, :, :, rows % self.lanes].reshape(len(rows), self.blocks, 16)
        return np.concatenate([packed & 15, packed >> 4], axis=2)

    def of_numbers(self, values: np.ndarray, as_halves: bool = False) -> np.ndarray:
        """[rows, blocks x n] -> [panels, blocks, n, lanes], flat: as they are, or the bits of float16."""
        split = values.reshape(-1, self.lanes, self.blocks, values.shape[1] // self.blocks).transpose(0, 2, 3, 1)
        if as_halves:
            return np.ascontiguousarray(split, np.float16).view(np.uint16).ravel()
        return np.ascontiguousarray(split).ravel()


Packed = tuple[np.ndarray, np.ndarray, np.ndarray]  # codes, scales, minimums


def nibbles(codes: Codes) -> np.ndarray:
    """Codes of four bits, uint8 [rows, blocks, 16]: byte i of a block has its columns i and 16 + i."""
    split = codes.codes.view(np.uint8).reshape(len(codes.codes), -1, BLOCK)
    return split[:, :, :16] | split[:, :, 16:] << 4


def _pack_nibbles(codes: Codes, order: Order, is_coarse: bool) -> Packed:
    assert codes.minimums is not None
    scales = codes.scales[:, ::2]
    return (
        order.of_codes(nibbles(codes), 4, 4),
        order.of_numbers(scales, is_coarse),
        order.of_numbers(codes.minimums, is_coarse),
    )


def _pack_bytes(codes: Codes, order: Order, is_coarse: bool) -> Packed:
    packed = order.of_codes(codes.codes, 16, 2)
    if is_coarse:
        return packed, order.of_numbers(codes.scales[:, ::2], True), np.zeros(0, np.uint16)
    minimums = np.zeros_like(codes.scales[:, ::2]) if codes.minimums is None else codes.minimums
    return packed, order.of_numbers(codes.scales, False), order.of_numbers(minimums, False)


@njit(inline="always")
def place(row, count, tiled):
    """Where the blocks of a row are stored: the first row of its tile, its position in the tile, and the rows of the
    tile. The rows of a tile are multiplied together, and are contiguous in memory: 16 of the first `tiled`, 4 of those
    behind, and one of the last."""
    if row < tiled:
        return row - row % TILE, row % TILE, TILE
    if row < count - (count - tiled) % ROWS:
        return row - (row - tiled) % ROWS, (row - tiled) % ROWS, ROWS
    return row, 0, 1


# Not inlined: Numba takes assignments to arrays in records for dead code where it looks into parallel loops.
@njit(nogil=True, error_model="numpy")
def _quantize_row(preparation, x, row, count, tiled, blocks, inputs):
    """Prepare a row of x -> `inputs`."""
    floats = np.empty(blocks * BLOCK, np.float32)
    prepare_row(preparation, x, row, blocks * BLOCK, floats, 0)
    first, side, beside = place(np.int64(row), count, tiled)
    # Of a row's codes, or one plane of them.
    width = BLOCK // inputs.codes.itemsize if beside == TILE else BLOCK
    for block in range(blocks):
        at = first * blocks + block * beside
        quantize_block(floats, block * BLOCK, inputs, at + side, at * BLOCK + side * width, beside == TILE)


@njit(inline="always")
def tiled_rows(count, tile, least):
    """How many rows are in tiles of 16. The last tile may lack some."""
    if tile == 0 or count < least:
        return 0
    return count + -count % tile if count % tile >= TILE_LEAST else count - count % tile


# Not with `np.zeros` where it is used: there, filling an array is a parallel region of its own.
@njit(nogil=True, error_model="numpy")
def _clear_padding(inputs, blocks, count, rows):
    """Rows `count` up to `rows`, which fill the last tile, have scales and sums of 0."""
    for row in range(count, rows):
        for block in range(blocks):
            at = (row - row % TILE) * blocks + block * TILE + row % TILE
            inputs.scales[at] = inputs.sums[at] = np.float32(0)


@njit(nogil=True, error_model="numpy")
def _multiply_tiles(weights, inputs, outputs, group, count):
    """The first `count` rows, which are in tiles, times a group of weights."""
    room = np.empty(weights.blocks * PANEL_BLOCK, np.int8)
    begin_products(weights)
    for panel in range(group * GROUP // LANES, (group + 1) * GROUP // LANES):
        if panel * LANES < outputs.width:
            widen(weights, panel, room)
            for row in range(0, count, TILE):
                sixteen_rows(weights, inputs, outputs, room, panel, row, min(TILE, count - row))
    end_products(weights)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def _multiply(step, source, norm, epsilon, codes, scales, minimums, x, blocks, loads, count, out, width, isa):
    """out [count, width] += prepared source @ weight.T; `x` is room for the codes of inputs, of their type, and a
    scale's columns of a panel take `loads` loads."""
    tiled = tiled_rows(count, isa.tile, TILED_BYTES if x.itemsize == 1 else TILED_WORDS)
    rows = max(count, tiled)
    x_scales, x_sums = np.empty(rows * blocks, np.float32), np.empty(rows * blocks, np.float32)
    _clear_padding(Inputs(x, x_scales, x_sums), blocks, count, rows)
    if count < ROWS_PARALLEL:
        for row in range(count):
            inputs, preparation = Inputs(x, x_scales, x_sums), Preparation(step, norm, epsilon)
            _quantize_row(preparation, source, row, count, tiled, blocks, inputs)
    else:
        for row in prange(count):
            inputs, preparation = Inputs(x, x_scales, x_sums), Preparation(step, norm, epsilon)
            _quantize_row(preparation, source, row, count, tiled, blocks, inputs)
    together = max(X_BYTES // (blocks * BLOCK * x.itemsize) // TILE * TILE, TILE)
    groups = (width + GROUP - 1) // GROUP
    for group in prange(min(tiled, 1) * groups):
        weights = Weights(codes, scales, minimums, blocks, loads, isa)
        inputs, outputs = Inputs(x, x_scales, x_sums), Outputs(out, width)
        _multiply_tiles(weights, inputs, outputs, group, min(count, tiled))
    for first in range(min(tiled, count), count, together):
        last = min(first + together, count)
        for group in prange(groups):
            weights = Weights(codes, scales, minimums, blocks, loads, isa)
            inputs, outputs = Inputs(x, x_scales, x_sums), Outputs(out, width)
            fours = last - (last - first) % ROWS
            begin, end = group * GROUP // isa.lanes, (group + 1) * GROUP // isa.lanes
            for panel in range(begin, end, panels_at_once(isa.lanes, ROWS)):
                for row in range(first, fours if panel * isa.lanes < width else 0, ROWS):
                    four_rows(weights, inputs, outputs, panel, row)
            for panel in range(begin, end, panels_at_once(isa.lanes, 1)):
                for row in range(fours, last if panel * isa.lanes < width else 0):
                    one_row(weights, inputs, outputs, panel, row)


def has_four_bits(tensors: Sequence[StoredTensor]) -> bool:
    """Whether all of them have codes of four bits."""
    return {tensor.format for tensor in tensors} <= FOUR_BITS


def can_pack(tensors: Sequence[StoredTensor]) -> bool:
    """Whether integer products are to be had for one matrix of these."""
    return all(
        tensor.format in CODED and tensor.columns % BLOCK == 0 and tensor.columns <= COLUMNS_MAX for tensor in tensors
    )
