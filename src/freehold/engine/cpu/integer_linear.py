"""Integer products of quantized weights and quantized inputs.

Inputs are quantized row by row in blocks of 32 columns: to 8 bits for four-bit weights, as in llama.cpp, and to 16 bits
for others, with an error below that of the weights. Sums inside a block are exact integers. Blocks are added as floats,
always in the same order. So a row's result depends only on that row, as with float32 products, and is the same with
every instruction set (`isa.py`). Weights of six bits and fewer with 16-bit inputs are in `row_scaled`.

A panel has as many rows as the instruction set has lanes, a group 32 rows. Codes are stored in reading order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np
from numba import njit

from freehold.contract.arrays import Float32, Int32
from freehold.engine.cpu.amx_only import end as end_products
from freehold.engine.cpu.borrowed import borrow, keep
from freehold.engine.cpu.codes import CODED, WITH_FINE_MINIMUMS, Codes, packed
from freehold.engine.cpu.integer_amx import LANES, PANEL_BLOCK, TILE, first_rows, next_rows
from freehold.engine.cpu.integer_amx import begin as begin_products
from freehold.engine.cpu.integer_tiles import (
    BLOCK,
    BYTE_LOADS,
    GROUP,
    NIBBLE_LOADS,
    ROWS,
    Inputs,
    Weights,
    four_rows,
    one_row,
    panels_at_once,
)
from freehold.engine.cpu.isa import Isa
from freehold.engine.cpu.onto import NOTHING, ONTO, Onto, outputs_of
from freehold.engine.cpu.operation import Operation, compiled, fields, given, made_once, numbers
from freehold.engine.cpu.pointwise import PLAINLY, Preparation, prepare_row
from freehold.engine.cpu.quantize import quantize_block
from freehold.engine.cpu.simd import scale_at
from freehold.models.tensor import StoredTensor, TensorFormat

if TYPE_CHECKING:
    from freehold.engine.cpu.program import Operations

# Minimum inputs, and rows of the last tile, for which tiles of 16 rows are faster: of 8 bits, of 16 bits.
TILED_BYTES, TILED_WORDS, TILE_LEAST = 128, 12, 12
# Bytes of inputs per portion, which stay in L2 while all weights stream by. CPUs with tile registers have 2 MB of it.
X_BYTES, TILED_X_BYTES = 96 << 10, 1 << 20
PORTION_LEAST = 128  # rows of a portion in tiles: weights are unpacked again for each portion
COLUMNS_MAX = 1 << 16  # keeps sums of byte products within 32 bits
FOUR_BITS = frozenset({TensorFormat.Q4_0, TensorFormat.Q4_1, TensorFormat.Q4_K})
# Formats with one float16 scale per 32 columns, and a minimum that float16 can represent.
COARSE = frozenset({TensorFormat.Q4_0, TensorFormat.Q4_1, TensorFormat.Q5_0, TensorFormat.Q8_0, TensorFormat.IQ4_NL})


@dataclass(frozen=True)
class IntegerMatrix:
    """codes: four bits uint8 [panels, blocks, 4, lanes, 4], where byte (j, lane, i) has columns 4 j + i (low half) and
    16 + 4 j + i of the block; or eight bits int8 [panels, blocks, 16, lanes, 2]. Panels are padded to whole groups.

    scales uint16 (float16, as stored) [panels, blocks, lanes]. Finer formats have float32: for four bits likewise, for
    eight bits [panels, blocks, 2, lanes], one per half block. minimums of the same type [panels, blocks, lanes]; none
    for eight bits with float16 scales. `inputs`: the type that inputs are quantized to.
    """

    rows: int
    columns: int
    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray
    inputs: type[np.signedinteger]
    isa: Isa

    @classmethod
    def pack(cls, tensors: Sequence[StoredTensor], isa: Isa) -> IntegerMatrix:
        """Pack the rows of tensors for which `can_pack` and `has_whole_blocks` hold."""
        kinds, columns = {tensor.format for tensor in tensors}, tensors[0].columns
        rows, order = sum(tensor.rows for tensor in tensors), Order(isa.lanes, columns // BLOCK)
        is_nibbles = has_four_bits(tensors)
        is_coarse = kinds <= (COARSE if is_nibbles else COARSE - FOUR_BITS)
        pack = _pack_nibbles if is_nibbles else _pack_bytes
        codes, scales, minimums = packed(tensors, GROUP, lambda codes: pack(codes, order, is_coarse))
        return cls(rows, columns, codes, scales, minimums, np.int8 if is_nibbles else np.int16, isa)

    @property
    def _loads(self) -> int:
        """Loads of codes that share a scale."""
        if self.codes.dtype == np.uint8:
            return NIBBLE_LOADS
        return BYTE_LOADS if self.scales.dtype == np.uint16 else BYTE_LOADS // 2

    def multiply(
        self, operations: Operations, x: Float32, out: Float32, preparation: Preparation = PLAINLY,
        onto: Onto = NOTHING,
    ) -> None:  # fmt: skip
        """Compute out [n, rows] = onto + prepared(x) [n, columns] @ weight.T, all C-contiguous."""
        count, blocks, is_bytes = len(out), self.columns // BLOCK, self.inputs is np.int8
        tiled = tiled_rows(count, self.isa.tile, TILED_BYTES if is_bytes else TILED_WORDS)
        rows = max(count, tiled)
        codes = operations.room((rows * self.columns,), self.inputs)
        scales, sums = operations.room((rows * blocks,)), operations.room((rows * blocks,))
        operations.add(
            _quantizing(self.inputs), rows, preparation.step, x, preparation.parameters, preparation.epsilon,
            codes, scales, sums, count, tiled, blocks,
        )  # fmt: skip
        multiply = _multiplying(self.isa, self.codes.dtype.type, self.scales.dtype.type, self.inputs)
        weights = self.codes, self.scales, self.minimums
        together, portions = divide_rows(count, tiled, codes.itemsize * self.columns)
        operations.add(
            multiply, portions * -(-self.rows // GROUP), *weights, blocks, self._loads, codes, scales, sums,
            count, tiled, together, *onto.arguments(out), out, self.rows,
        )  # fmt: skip

    def gather(self, operations: Operations, rows: Int32) -> Float32:
        """Return some rows' weights as in the file, float32 [n, columns]."""
        out = operations.room((len(rows), self.columns))
        operations.add(
            _gathering(self.codes.dtype.type, self.scales.dtype.type), len(rows), self.codes, self.scales,
            self.minimums, len(self.minimums) > 0, self.columns // BLOCK, 2 if self._loads == BYTE_LOADS // 2 else 1,
            self.isa.lanes, rows, out,
        )  # fmt: skip
        return out


_GATHER = fields("codes scales minimums has_minimums blocks parts lanes wanted out")


@made_once
def _gathering(of_codes: type[np.generic], of_scales: type[np.generic]) -> Operation:
    is_nibbles = of_codes is np.uint8
    steps, beside = (NIBBLE_LOADS, 4) if is_nibbles else (BYTE_LOADS, 2)

    def gather(at, first, stop):
        """Gather rows."""
        of = given(at)
        codes, scales = numbers(of.codes, of_codes), numbers(of.scales, of_scales)
        minimums = numbers(of.minimums, of_scales)
        wanted, out = numbers(of.wanted, np.int32), numbers(of.out, np.float32)
        for i in range(first, stop):
            row, to = np.int64(wanted[i]), i * of.blocks * BLOCK
            panel, lane = row // of.lanes, row % of.lanes
            for number in range(panel * of.blocks, (panel + 1) * of.blocks):
                minimum = scale_at(minimums, number * of.lanes + lane) if of.has_minimums else np.float32(0)
                for part in range(of.parts):
                    scale = scale_at(scales, (number * of.parts + part) * of.lanes + lane)
                    for step in range(part * steps // of.parts, (part + 1) * steps // of.parts):
                        at = ((number * steps + step) * of.lanes + lane) * beside
                        for k in range(beside):
                            code = codes[at + k]
                            if is_nibbles:
                                out[to + step * beside + k] = scale * np.float32(code & 15) + minimum
                                out[to + BLOCK // 2 + step * beside + k] = scale * np.float32(code >> 4) + minimum
                            else:
                                value = scale * np.float32(code)
                                out[to + step * beside + k] = value + minimum if of.has_minimums else value
                to += BLOCK

    return compiled(gather, _GATHER)


class Order(NamedTuple):
    """The order in which a matrix is read: panel by panel, block by block."""

    lanes: int
    blocks: int

    def of_codes(self, codes: np.ndarray, steps: int, beside: int) -> np.ndarray:
        """Reorder [rows, columns of bytes] -> [panels, blocks, steps, lanes, beside], flat."""
        split = codes.reshape(-1, self.lanes, self.blocks, steps, beside)
        return np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4)).ravel()

    def of_numbers(self, values: np.ndarray, as_halves: bool = False) -> np.ndarray:
        """Reorder [rows, blocks x n] -> [panels, blocks, n, lanes], flat: unchanged, or as float16 bits."""
        split = values.reshape(-1, self.lanes, self.blocks, values.shape[1] // self.blocks).transpose(0, 2, 3, 1)
        if as_halves:
            return np.ascontiguousarray(split, np.float16).view(np.uint16).ravel()
        return np.ascontiguousarray(split).ravel()


Packed = tuple[np.ndarray, np.ndarray, np.ndarray]  # codes, scales, minimums


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Pack four-bit codes [rows, columns] -> uint8 [rows, blocks, 16]: byte i of a block has columns i and 16 + i."""
    split = codes.view(np.uint8).reshape(len(codes), -1, BLOCK)
    return split[:, :, :16] | split[:, :, 16:] << 4


def _pack_nibbles(codes: Codes, order: Order, is_coarse: bool) -> Packed:
    assert codes.minimums is not None
    scales = codes.scales[:, ::2]
    return (
        order.of_codes(nibbles(codes.codes), 4, 4),
        order.of_numbers(scales, is_coarse),
        order.of_numbers(codes.minimums[:, ::2], is_coarse),
    )


def _pack_bytes(codes: Codes, order: Order, is_coarse: bool) -> Packed:
    packed = order.of_codes(codes.codes, 16, 2)
    if is_coarse:
        return packed, order.of_numbers(codes.scales[:, ::2], True), np.zeros(0, np.uint16)
    minimums = np.zeros_like(codes.scales) if codes.minimums is None else codes.minimums
    assert np.array_equal(minimums[:, ::2], minimums[:, 1::2]), "both halves of a block have the same minimum"
    return packed, order.of_numbers(codes.scales, False), order.of_numbers(minimums[:, ::2], False)


@njit(inline="always")
def place(row, count, tiled):
    """Return where a row's blocks are stored: its tile's first row, its position in the tile, and the tile's rows. A
    tile's rows are multiplied together and contiguous: 16 for the first `tiled`, then 4, and 1 for the rest."""
    if row < tiled:
        return row - row % TILE, row % TILE, TILE
    if row < count - (count - tiled) % ROWS:
        return row - (row - tiled) % ROWS, (row - tiled) % ROWS, ROWS
    return row, 0, 1


@njit(inline="always")
def _quantize_row(preparation, x, row, count, tiled, blocks, inputs, floats):
    """Prepare a row of x in `floats`, and quantize it into `inputs`."""
    prepare_row(preparation, x, row, blocks * BLOCK, floats, 0)
    first, side, beside = place(np.int64(row), count, tiled)
    # Width of a row's codes, or one plane of them.
    width = BLOCK // inputs.codes.itemsize if beside == TILE else BLOCK
    for block in range(blocks):
        at = first * blocks + block * beside
        quantize_block(floats, block * BLOCK, inputs, at + side, at * BLOCK + side * width, beside == TILE)


def tiled_rows(count: int, tile: int, least: int) -> int:
    """Return how many rows are in tiles of 16. The last tile may be partial."""
    if tile == 0 or count < least:
        return 0
    return count + -count % tile if count % tile >= TILE_LEAST else count - count % tile


def divide_rows(count: int, tiled: int, row_bytes: int) -> tuple[int, int]:
    """Return the rows per portion of inputs, and the number of portions. The `tiled` rows come first. A portion stays
    in the cache, and each thread gets at least one, so that its next operation finds the row in its own cache."""
    size = TILED_X_BYTES if tiled else X_BYTES
    together = max(size // row_bytes // TILE * TILE, TILE)
    share = -(-tiled // numba.get_num_threads() // TILE) * TILE
    together = min(together, max(share, PORTION_LEAST)) if tiled else together
    others = max(count - tiled, 0)
    return together, -(-tiled // together) + -(-others // together)


@njit(inline="always")
def portion_of(of, task):
    """Return the group, first row and end row of a task of the product with arguments `of`. Tasks of the first portion,
    with all groups, come first."""
    groups = (of.width + GROUP - 1) // GROUP
    portion, group = task // groups, task % groups
    of_tiles = (of.tiled + of.together - 1) // of.together
    first = portion * of.together
    if portion < of_tiles:
        return group, first, min(first + of.together, of.tiled, of.count)
    first += of.tiled - of_tiles * of.together
    return group, first, min(first + of.together, of.count)


@njit(inline="always")
def _clear_row(inputs, row, blocks):
    """Clear a padding row of the last tile: its scales and sums are 0."""
    for block in range(blocks):
        at = (row - row % TILE) * blocks + block * TILE + row % TILE
        inputs.scales[at] = inputs.sums[at] = np.float32(0)


_QUANTIZE = fields("step x parameters epsilon:f codes scales sums count tiled blocks")


@made_once
def _quantizing(kind: type[np.signedinteger]) -> Operation:
    def quantize(at, first, stop):
        """Quantize rows, and clear the rows that pad the last tile."""
        of = given(at)
        inputs = Inputs(numbers(of.codes, kind), numbers(of.scales, np.float32), numbers(of.sums, np.float32))
        preparation = Preparation(of.step, numbers(of.parameters, np.float32), np.float32(of.epsilon))
        x, room = numbers(of.x, np.float32), np.empty(of.blocks * BLOCK, np.float32)
        for row in range(first, stop):
            if row < of.count:
                _quantize_row(preparation, x, row, of.count, of.tiled, of.blocks, inputs, borrow(room))
            else:
                _clear_row(inputs, row, of.blocks)
        keep(room)

    return compiled(quantize, _QUANTIZE)


@njit(inline="always")
def _multiply_tiles(weights, inputs, outputs, room, group, first, last):
    """Multiply rows `first` up to `last`, which are in tiles, by a group of weights."""
    for panel in range(group * GROUP // LANES, (group + 1) * GROUP // LANES):
        if panel * LANES < outputs.width:
            first_rows(weights, inputs, outputs, room, panel, first, min(TILE, last - first))
            for row in range(first + TILE, last, TILE):
                next_rows(weights, inputs, outputs, room, panel, row, min(TILE, last - row))


@njit(inline="always")
def _multiply_rows(weights, inputs, outputs, group, first, last):
    """Multiply rows `first` up to `last`, in fours and singly, by a group of weights."""
    lanes, fours = weights.isa.lanes, last - (last - first) % ROWS
    begin, end = group * GROUP // lanes, (group + 1) * GROUP // lanes
    for panel in range(begin, end, panels_at_once(lanes, ROWS)):
        for row in range(first, fours if panel * lanes < outputs.width else 0, ROWS):
            four_rows(weights, inputs, outputs, panel, row)
    for panel in range(begin, end, panels_at_once(lanes, 1)):
        for row in range(fours, last if panel * lanes < outputs.width else 0):
            one_row(weights, inputs, outputs, panel, row)


_MULTIPLY = fields(f"codes scales minimums blocks loads x x_scales x_sums count tiled together {ONTO} out width")


@made_once
def _multiplying(
    isa: Isa, of_codes: type[np.generic], of_scales: type[np.generic], of_inputs: type[np.signedinteger]
) -> Operation:
    def multiply(at, first, stop):
        """Multiply groups of weights by portions of inputs."""
        of = given(at)
        weights = Weights(
            numbers(of.codes, of_codes), numbers(of.scales, of_scales), numbers(of.minimums, of_scales),
            of.blocks, of.loads, isa,
        )  # fmt: skip
        x = numbers(of.x, of_inputs)
        inputs = Inputs(x, numbers(of.x_scales, np.float32), numbers(of.x_sums, np.float32))
        owner = np.empty(of.blocks * PANEL_BLOCK if of.tiled else 1, np.int8)
        if of.tiled:
            begin_products(weights)
        outputs, room = outputs_of(of), borrow(owner)
        for task in range(first, stop):
            group, row, last = portion_of(of, task)
            if row < of.tiled:
                _multiply_tiles(weights, inputs, outputs, room, group, row, last)
            else:
                _multiply_rows(weights, inputs, outputs, group, row, last)
        if of.tiled:
            end_products(weights)
        keep(owner)

    return compiled(multiply, _MULTIPLY)


def has_four_bits(tensors: Sequence[StoredTensor]) -> bool:
    """Return whether all of them have four-bit codes."""
    return {tensor.format for tensor in tensors} <= FOUR_BITS


def has_whole_blocks(tensors: Sequence[StoredTensor]) -> bool:
    """Return whether all have one minimum per 32 columns, as an `IntegerMatrix` requires."""
    return not {tensor.format for tensor in tensors} & WITH_FINE_MINIMUMS


def can_pack(tensors: Sequence[StoredTensor]) -> bool:
    """Return whether one matrix of these supports integer products."""
    return all(
        tensor.format in CODED and tensor.columns % BLOCK == 0 and tensor.columns <= COLUMNS_MAX for tensor in tensors
    )
