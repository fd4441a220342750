"""Products of weights of up to six bits with 16-bit inputs, in integers over whole rows.

A row of weights has one unit, a float. Each block of 32 columns, or each half of it, has a scale and a minimum that are
16-bit integers in this unit: a weight is code x scale + minimum, a 16-bit integer as well. Rounding them changes a
weight by at most 0.014 % of the largest in its row if codes have four bits, 0.026 % if five, 0.05 % if six. A row of
inputs has one unit, too. So the sum over a row is an integer, independent of the order of its terms: the same in any
batch, with any tile and every instruction set. It is rounded once.

Factors are split into digits for processors that multiply bytes: both factors into two signed ones (`row_scaled_amx`),
or only the inputs (`row_scaled_tiles`). A panel has as many rows as the instruction set has lanes, a group 32 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import types

from freehold.contract.arrays import Float32, Int32
from freehold.engine.cpu.amx_only import end as end_products
from freehold.engine.cpu.borrowed import borrow, keep
from freehold.engine.cpu.cache_line import LINE, aligned
from freehold.engine.cpu.codes import WITH_MINIMUMS, Codes, packed
from freehold.engine.cpu.few_bits import FEW_BITS, Coding, Form, code_at, coding_of, pack_codes
from freehold.engine.cpu.integer_linear import Order, divide_rows, place, portion_of, tiled_rows
from freehold.engine.cpu.integer_tiles import BLOCK, GROUP, ROWS, Records, has_wide_totals
from freehold.engine.cpu.isa import Isa
from freehold.engine.cpu.onto import NOTHING, ONTO, Onto, outputs_of
from freehold.engine.cpu.operation import Operation, compiled, fields, given, made_once, numbers
from freehold.engine.cpu.pointwise import PLAINLY, Preparation, largest_size, prepare_row
from freehold.engine.cpu.row_scaled_amx import PANELS, SLAB, TILE, Rows, room_size, sum_first, sum_next, write_rows
from freehold.engine.cpu.row_scaled_amx import begin as begin_products
from freehold.engine.cpu.row_scaled_tiles import (
    DIGITS,
    LARGEST,
    Inputs,
    Weights,
    four_rows,
    loads_at_once,
    one_row,
)
from freehold.engine.cpu.simd import FLOATS, INTS
from freehold.engine.cpu.vectors import I8, I16, I32, constant, halves, intrinsic, math, slice_of, splat
from freehold.engine.cpu.vectors import joined as concatenated
from freehold.models.tensor import StoredTensor

if TYPE_CHECKING:
    from freehold.engine.cpu.program import Operations

NO_MINIMUMS = np.zeros(0, np.int8)
LEAST = np.float32(1e-30)  # rows of smaller weights are 0: their unit might be
_HAS_VBMI = bool(llvm.get_host_cpu_features().get("avx512vbmi"))
TILED = 12  # minimum inputs for which tiles of 16 rows are faster


@dataclass(frozen=True)
class RowScaledMatrix:
    """codes uint8 [panels, blocks, bytes of a block] in a form (`few_bits`); scales and minimums int16 [panels, blocks,
    parts of the form, lanes]; units float32 [panels x lanes]. Panels are padded to whole groups. Minimums are int8 [0]
    if no format has any: then a weight is (code - `offset`) x scale."""

    rows: int
    columns: int
    codes: np.ndarray
    scales: np.ndarray
    minimums: np.ndarray
    units: Float32
    offset: int
    form: Form
    isa: Isa

    @classmethod
    def pack(cls, tensors: Sequence[StoredTensor], isa: Isa) -> RowScaledMatrix:
        """Pack the rows of tensors for which `has_few_bits` holds."""
        rows, columns = sum(tensor.rows for tensor in tensors), tensors[0].columns
        order, kinds = Order(isa.lanes, columns // BLOCK), {tensor.format for tensor in tensors}
        coding, has_minimums = coding_of(kinds), bool(kinds & WITH_MINIMUMS)
        codes, scales, minimums, units = packed(tensors, GROUP, lambda codes: _pack(codes, coding, has_minimums, order))
        return cls(rows, columns, codes, scales, minimums, units, coding.offset, coding.form, isa)

    @property
    def loads(self) -> int:
        """Loads of codes that are summed at once."""
        return loads_at_once(self.form.bits, has_wide_totals(type(self.isa)))

    def multiply(
        self, operations: Operations, x: Float32, out: Float32, preparation: Preparation = PLAINLY,
        onto: Onto = NOTHING,
    ) -> None:  # fmt: skip
        """Compute out [n, rows] = onto + prepared(x) [n, columns] @ weight.T, all C-contiguous."""
        count, blocks = len(out), self.columns // BLOCK
        tiled, each = tiled_rows(count, self.isa.tile, TILED), _row_bytes(blocks)
        rows = max(count, tiled)
        codes = operations.room((rows * each,), np.int8)
        units, sums = operations.room((rows,)), operations.room((rows * blocks * self.form.parts * DIGITS,), np.int32)
        operations.add(
            _quantizing(), count, preparation.step, x, preparation.parameters, preparation.epsilon, codes, units, sums,
            count, tiled, blocks, self.form.parts,
        )  # fmt: skip
        weights = self.codes, self.scales, self.minimums, self.units
        together, portions = divide_rows(count, tiled, each)
        operations.add(
            _multiplying(self.isa, self.form, self.minimums.dtype.type), portions * -(-self.rows // GROUP), *weights,
            blocks, self.loads, self.offset, codes, units, sums, count, tiled, together, *onto.arguments(out), out,
            self.rows,
        )  # fmt: skip

    def gather(self, operations: Operations, rows: Int32) -> Float32:
        """Return some rows' weights as multiplied, float32 [n, columns]."""
        out = operations.room((len(rows), self.columns))
        operations.add(
            _gathering(), len(rows), self.codes, self.scales, self.minimums, len(self.minimums) > 0, self.units,
            self.columns // BLOCK, self.form.bits, self.form.parts, self.offset, self.isa.lanes, rows, out,
        )  # fmt: skip
        return out


def has_few_bits(tensors: Sequence[StoredTensor]) -> bool:
    """Return whether all of them have codes of six bits or fewer."""
    return {tensor.format for tensor in tensors} <= FEW_BITS


def _pack(
    codes: Codes, coding: Coding, has_minimums: bool, order: Order
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Float32]:
    """Return codes, scales, minimums and units of some groups of rows."""
    parts = coding.form.parts
    lowest, highest = (codes.limits[:, [side]] + coding.offset for side in range(2))
    middle = np.floor((lowest + highest + 1) / 2)
    scales = codes.scales[:, :: 2 // parts]
    least = -coding.offset * scales
    if codes.minimums is not None:
        least += codes.minimums[:, :: 2 // parts]
    largest = np.maximum(np.abs(least), np.abs(least + highest * scales)).max(axis=1)
    # Reserve room for the error of the largest code times a rounded scale.
    most = np.float32(LARGEST - (coding.most + 1 >> 1))
    units = np.where(largest > LEAST, largest / most, np.float32(1)).astype(np.float32)
    rounded = np.rint(scales / units[:, None])
    # Center on the middle codes, which suffer least from a rounded scale.
    least = np.rint((least + middle * scales) / units[:, None]) - middle * rounded
    rounded, least = (order.of_numbers(values.astype(np.int16)) for values in (rounded, least))
    return pack_codes(codes, coding, order), rounded, least if has_minimums else NO_MINIMUMS, units


def _gather(at, first, stop):
    """Gather rows."""
    of = given(at)
    codes, units = numbers(of.codes, np.uint8), numbers(of.units, np.float32)
    scales, minimums = numbers(of.scales, np.int16), numbers(of.minimums, np.int16)
    wanted, out, width = numbers(of.wanted, np.int32), numbers(of.out, np.float32), BLOCK // of.parts
    for i in range(first, stop):
        row, unit = np.int64(wanted[i]), units[wanted[i]]
        panel, lane = row // of.lanes, row % of.lanes
        to = i * of.blocks * BLOCK
        for number in range(panel * of.blocks, (panel + 1) * of.blocks):
            for column in range(BLOCK):
                at = (number * of.parts + column // width) * of.lanes + lane
                scale = np.int32(scales[at])
                minimum = np.int32(minimums[at]) if of.has_minimums else -np.int32(of.offset) * scale
                code = code_at(codes, of.bits, of.lanes, number, lane, column)
                out[to + column] = np.float32(code * scale + minimum) * unit
            to += BLOCK


_GATHER = fields("codes scales minimums has_minimums units blocks bits parts offset lanes wanted out")


@made_once
def _gathering() -> Operation:
    return compiled(_gather, _GATHER)


# -- inputs -------------------------------------------------------------------------------------------


class _Emitter(Records):
    """Emits the split of BLOCK floats from `at`, times a factor, into digits: lower ones from `to` on, upper ones
    `apart` bytes later. Returns the codes, in two halves."""

    def emit(self):
        builder, (_, at, factor, _, to, apart) = self.builder, self.values[:6]
        factors = splat(builder, factor, FLOATS)
        parts = [builder.load(self.array(0, self.linear(at, half), FLOATS), align=4) for half in (0, 16)]
        codes = [builder.fptosi(math(builder, "rint", [builder.fmul(part, factors)]), INTS) for part in parts]
        for digit, values in enumerate(_split(builder, codes) if _HAS_VBMI else _narrow(builder, codes)):
            place = self.at(3, 0, self.linear(to, (apart, digit)), values.type)
            builder.store(values, place, align=1)
        return codes


def _split(builder, codes) -> list[Any]:
    """Return the digits of codes. The upper digit is rounded to nearest, since the lower one is signed. One instruction
    picks all bytes."""
    wide = ir.VectorType(I8, 64)
    rounded = [builder.bitcast(builder.add(half, constant(INTS, 128)), wide) for half in codes]
    order = [4 * lane + digit for digit in range(DIGITS) for lane in range(BLOCK)]
    picked = builder.shuffle_vector(*rounded, ir.Constant(ir.VectorType(I32, 64), order))
    return [
        builder.xor(slice_of(builder, picked, BLOCK, 0), constant(ir.VectorType(I8, BLOCK), 0x80)),
        slice_of(builder, picked, BLOCK, 1),
    ]


def _narrow(builder, codes) -> list[Any]:
    """Split likewise, without that instruction."""
    words, bytes_ = (ir.VectorType(kind, BLOCK) for kind in (I16, I8))
    low = builder.trunc(concatenated(builder, *codes), words)
    high = builder.lshr(builder.add(low, constant(words, 128)), constant(words, 8))
    return [builder.trunc(low, bytes_), builder.trunc(high, bytes_)]


def _define_digits(typingctx, floats, at, factor, inputs, to, apart):
    def codegen(context, builder, signature, values):
        _Emitter(context, builder, signature, values).emit()
        return context.get_dummy_value()

    return types.void(floats, types.intp, types.float32, inputs, types.intp, types.intp), codegen


def _digits_and_sums(parts: int) -> Any:
    def define(typingctx, floats, at, factor, inputs, to, apart, number):
        def codegen(context, builder, signature, values):
            emitter = _Emitter(context, builder, signature, values)
            codes = emitter.emit()
            upper = [builder.ashr(builder.add(half, constant(INTS, 128)), constant(INTS, 8)) for half in codes]
            if parts == 1:
                codes, upper = ([builder.add(*of_halves)] for of_halves in (codes, upper))
            for part, of_digits in enumerate(zip(codes, upper, strict=True)):
                total, high = (halves(builder, one, builder.add) for one in of_digits)
                low = builder.sub(total, builder.shl(high, ir.Constant(I32, 8)))
                for digit, found in enumerate((low, high)):
                    at = emitter.linear((values[6], DIGITS), (part, DIGITS), digit)
                    builder.store(found, emitter.at(3, 2, at, I32))
            return context.get_dummy_value()

        numbers = types.intp
        return types.void(floats, numbers, types.float32, inputs, numbers, numbers, numbers), codegen

    return intrinsic(define)


_put_digits: Any = intrinsic(_define_digits)
"""(floats, at, factor, inputs, to, apart): 32 floats from `at` on, times a factor, as digits of `Inputs`."""
_put_digits_and_sum, _put_digits_and_two_sums = (_digits_and_sums(parts) for parts in (1, 2))
"""(..., number): the same, with the sums of their digits stored as number `number`. Or those of both halves as this one
and the next."""


@njit(inline="always")
def _row_bytes(blocks):
    return (blocks + 1) // 2 * 2 * BLOCK * DIGITS


@njit(inline="always")
def _quantize_row(preparation, x, row, count, tiled, blocks, parts, inputs, floats):
    """Prepare a row of x in `floats`, and quantize it into `inputs`. A tile of 16 rows is stored as [pairs of blocks,
    digits, 16, 64], a smaller one as [blocks, digits, rows, 32]."""
    prepare_row(preparation, x, row, blocks * BLOCK, floats, 0)
    largest = largest_size(floats, 0, blocks * BLOCK)
    factor = np.float32(LARGEST) / largest if largest > 0 else np.float32(0)
    inputs.units[row] = largest / np.float32(LARGEST)
    first, side, beside = place(np.int64(row), count, tiled)
    start = first * _row_bytes(blocks)
    if beside == TILE:  # its products need no block sums
        for block in range(blocks):
            to = start + block // 2 * DIGITS * SLAB + side * 2 * BLOCK + block % 2 * BLOCK
            _put_digits(floats, block * BLOCK, factor, inputs, to, SLAB)
        return
    for block in range(blocks):
        to = start + (block * DIGITS * beside + side) * BLOCK
        number = (first * blocks + block * beside + side) * parts
        if parts == 2:
            _put_digits_and_two_sums(floats, block * BLOCK, factor, inputs, to, beside * BLOCK, number)
        else:
            _put_digits_and_sum(floats, block * BLOCK, factor, inputs, to, beside * BLOCK, number)


def _quantize(at, first, stop):
    """Quantize rows."""
    of = given(at)
    codes, units, sums = numbers(of.codes, np.int8), numbers(of.units, np.float32), numbers(of.sums, np.int32)
    preparation = Preparation(of.step, numbers(of.parameters, np.float32), np.float32(of.epsilon))
    x, room = numbers(of.x, np.float32), np.empty(of.blocks * BLOCK, np.float32)
    for row in range(first, stop):
        inputs = Inputs(codes, units, sums)
        _quantize_row(preparation, x, row, of.count, of.tiled, of.blocks, of.parts, inputs, borrow(room))
    keep(room)


_QUANTIZE = fields("step x parameters epsilon:f codes units sums count tiled blocks parts")


@made_once
def _quantizing() -> Operation:
    return compiled(_quantize, _QUANTIZE)


# -- products -----------------------------------------------------------------------------------------


@njit(inline="always")
def _multiply_tiles(weights, inputs, outputs, room, before, group, first, last):
    """Multiply rows `first` up to `last`, which are in tiles, by a group of weights. Write outputs of the rows `before`
    meanwhile. Return the rows still to write."""
    panel = group * PANELS
    sum_first(weights, inputs, outputs, room, panel, first, last - first <= TILE, before)
    for row in range(first + TILE, last, TILE):
        sum_next(weights, inputs, outputs, room, panel, row)
    row = first + (last - first - 1) // TILE * TILE
    return Rows(panel, row, last - row)


@njit(inline="always")
def _multiply_rows(weights, inputs, outputs, group, first, last):
    """Multiply rows `first` up to `last`, in fours and singly, by a group of weights."""
    lanes, fours = weights.isa.lanes, last - (last - first) % ROWS
    for panel in range(group * GROUP // lanes, (group + 1) * GROUP // lanes):
        end = last if panel * lanes < outputs.width else 0
        for row in range(first, min(fours, end), ROWS):
            four_rows(weights, inputs, outputs, panel, row)
        for row in range(fours, end):
            one_row(weights, inputs, outputs, panel, row)


_MULTIPLY = fields(
    f"codes scales minimums units blocks loads offset x x_units x_sums count tiled together {ONTO} out width"
)


@made_once
def _multiplying(isa: Isa, form: Form, of_minimums: type[np.generic]) -> Operation:
    def multiply(at, first, stop):
        """Multiply groups of weights by portions of inputs."""
        of = given(at)
        weights = Weights(
            numbers(of.codes, np.uint8), numbers(of.scales, np.int16), numbers(of.minimums, of_minimums),
            numbers(of.units, np.float32), of.blocks, of.loads, of.offset, form, isa,
        )  # fmt: skip
        inputs = Inputs(numbers(of.x, np.int8), numbers(of.x_units, np.float32), numbers(of.x_sums, np.int32))
        owner = np.empty(room_size(of.blocks) + LINE if of.tiled else LINE, np.int8)
        if of.tiled:
            begin_products(weights)
        outputs, room, before = outputs_of(of), borrow(aligned(owner)), Rows(0, 0, 0)
        for task in range(first, stop):
            group, row, last = portion_of(of, task)
            if row < of.tiled:
                before = _multiply_tiles(weights, inputs, outputs, room, before, group, row, last)
            else:
                _multiply_rows(weights, inputs, outputs, group, row, last)
        write_rows(weights, inputs, outputs, room, before)
        if of.tiled:
            end_products(weights)
        keep(owner)

    return compiled(multiply, _MULTIPLY)
