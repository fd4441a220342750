"""The inner loops of `row_scaled`: one or four rows of inputs times a panel of weights, in vectors.

Each of the two input digits has a 32-bit integer sum: block products times the scale, and the sum of inputs times the
minimum. Terms may overflow harmlessly: arithmetic is modulo 2**32, and the total, weights times inputs, fits for
`BLOCKS_AT_ONCE` blocks. Both digits of so many are added to the row's sum in float64. It is below 2**53, so nothing is
rounded.

With one row, products are memory-bound. Panels are read one by one: two at a time, with alternating lines, are read at
half the speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types

from freehold.engine.cpu.few_bits import Form
from freehold.engine.cpu.integer_tiles import (
    BLOCK,
    NIBBLE_LOADS,
    ROWS,
    IntegerVectors,
    Records,
    has_wide_totals,
    kernel,
    write_output,
)
from freehold.engine.cpu.vectors import F32, F64, I16, I32, I64, constant, joined, math, slice_of, splat

DIGITS = 2  # of inputs: signed bytes, the lower one first
LARGEST = 32_639  # weight, or input: 127 x 256 + 127
BLOCKS_AT_ONCE = (2**31 - 1) // (BLOCK * LARGEST * 128)


class Weights(NamedTuple):
    """A `RowScaledMatrix` with `blocks` per row. `loads` of codes are summed at a time (`loads_at_once`). The compiler
    must not know these counts: it would unroll the loop and run out of registers. Minimums of type int8 are -`offset` x
    scale each."""

    codes: Any
    scales: Any
    minimums: Any
    units: Any
    blocks: int
    loads: int
    offset: int
    form: Any
    isa: Any


class Kind(NamedTuple):
    """What kernels are compiled for."""

    form: Form
    has_minimums: bool
    isa: type

    @classmethod
    def of(cls, weights: Any) -> Kind:
        """Return the kind of `weights`, the type of `Weights` in compiled code."""
        kinds = dict(zip(weights.fields, weights.types, strict=True))
        return cls(kinds["form"].instance_class(), kinds["minimums"].dtype == types.int16, kinds["isa"].instance_class)


OFFSET = Weights._fields.index("offset")


def loads_at_once(bits: int, has_wide_totals: bool) -> int:
    """Return the loads of codes summed before widening to 32 bits. Four products of 63 x 128 are below 2**15, as are
    eight of 31 x 128, a half of each load, and sixteen of 15 x 128."""
    return NIBBLE_LOADS // 2 if bits == 6 and not has_wide_totals else NIBBLE_LOADS


class Inputs(NamedTuple):
    """Codes as digits, int8; a float32 unit per row; the sum of each digit for each part of a block, int32."""

    codes: Any
    units: Any
    sums: Any


def write_products(records: Records, panel, row, sums) -> None:
    """Write `sums` in float64, the first and second half of the lanes, rounded, as `write_sums` does."""
    builder, half = records.builder, sums[0].type.count
    rounded = [builder.fptrunc(one, ir.VectorType(F32, half)) for one in sums]
    write_sums(records, panel, row, joined(builder, *rounded))


def write_sums(records: Records, panel, row, sums, write: Callable[..., None] = write_output) -> None:
    """Write outputs[row, the panel's columns] = onto + sums, floats of all lanes, times both units. The kernel's
    arguments are weights, inputs, outputs, ..."""
    builder, floats = records.builder, sums.type
    unit = splat(builder, builder.load(records.at(1, 1, row, F32)), floats)
    of_weights = builder.load(records.at(0, 3, records.linear((panel, floats.count)), floats), align=4)
    write(records, panel, row, builder.fmul(sums, builder.fmul(unit, of_weights)))


class _Emitter(Records):
    """Emits one kernel: a panel times `rows` rows of inputs from `row` on."""

    def __init__(self, context, builder, signature, values, rows: int):
        super().__init__(context, builder, signature, values)
        self.form, self.has_minimums, isa = Kind.of(signature.args[0])
        self.vectors, self.is_wide = IntegerVectors(isa), has_wide_totals(isa)
        self.lanes, self.rows = self.vectors.lanes, rows
        self.doubles = ir.VectorType(F64, self.lanes // 2)  # a register: never wider than those of integers
        self.blocks, self.loads = self.field(0, 4), self.field(0, 5)
        self.panel, self.row = values[3], values[4]
        self.stride = row_bytes(builder, self.blocks)

    def emit(self) -> None:
        builder, rows, most = self.builder, range(self.rows), ir.Constant(I64, BLOCKS_AT_ONCE)
        sums = [[self.cleared(self.doubles) for _ in range(2)] for _ in rows]
        runs = builder.udiv(builder.add(self.blocks, builder.sub(most, ir.Constant(I64, 1))), most)
        with cgutils.for_range(builder, runs) as run:
            digits = [[self.cleared(self.vectors.ints) for _ in range(DIGITS)] for _ in rows]
            first = builder.mul(run.index, most)
            end = builder.add(first, most)
            last = builder.select(builder.icmp_signed("<", end, self.blocks), end, self.blocks)
            with cgutils.for_range(builder, last, first) as block:
                number = self.linear((self.panel, self.blocks), block.index)
                for part in range(self.form.parts):
                    scale, minimum = self.of_weights(number, part)
                    self.add_products(number, block.index, part, scale, digits)
                    self.add_minimums(block.index, part, minimum, digits)
            for row, of_row in zip(sums, digits, strict=True):
                self.add_digits(of_row, row)
        for row, halves in zip(rows, sums, strict=True):
            found = [builder.load(half) for half in halves]
            write_products(self, self.panel, self.linear(self.row, row), found)

    def cleared(self, kind):
        place = cgutils.alloca_once(self.builder, kind)
        self.builder.store(constant(kind, 0), place)
        return place

    def of_weights(self, number, part: int) -> tuple[Any, Any]:
        """Return scales and minimums of a part of the panel's block, `number` in the matrix: an integer per lane."""
        builder, parts = self.builder, self.form.parts

        def integers(index):
            kind, at = ir.VectorType(I16, self.lanes), self.linear((number, parts * self.lanes), part * self.lanes)
            self.prefetch(index, at, parts * self.lanes)
            return builder.sext(builder.load(self.at(0, index, at, kind), align=2), self.vectors.ints)

        scale = integers(1)
        if self.has_minimums:
            return scale, integers(2)
        offset = builder.trunc(builder.neg(self.field(0, OFFSET)), I32)
        return scale, builder.mul(scale, splat(builder, offset, self.vectors.ints))

    def add_products(self, number, block, part: int, scale, digits) -> None:
        """Add scale x the sum of products of a part of a block to digits[row][digit]."""
        builder, halves = self.builder, range(2) if self.form.parts == 1 else (part,)
        for at_once in (halves,) if self.form.bits == 4 or self.is_wide else zip(halves):
            for first in range(0, NIBBLE_LOADS, loads_at_once(self.form.bits, self.is_wide)):
                totals = [[self.cleared(self.vectors.byte_total) for _ in range(DIGITS)] for _ in digits]
                with cgutils.for_range(builder, self.loads) as load:
                    self.multiply(number, block, self.linear(load.index, first), at_once, totals)
                for of_row, found in zip(digits, totals, strict=True):
                    for place, total in zip(of_row, found, strict=True):
                        scaled = self.vectors.scaled(builder, builder.load(total), scale)
                        builder.store(builder.add(builder.load(place), scaled), place)

    def add_minimums(self, block, part: int, minimum, digits) -> None:
        """Add minimum x the sum of inputs of a part of a block to digits[row][digit]."""
        builder, vectors, parts = self.builder, self.vectors, self.form.parts
        for row, of_row in enumerate(digits):
            at = self.linear((self.row, self.blocks, parts), (block, self.rows * parts), row * parts + part)
            for digit, place in enumerate(of_row):
                found = builder.load(self.at(1, 2, self.linear((at, DIGITS), digit), I32))
                inputs, total = splat(builder, found, vectors.ints), builder.load(place)
                if self.has_minimums:
                    total = vectors.add_lower_words(builder, total, minimum, inputs)
                else:  # a minimum may exceed 16 bits: codes of a row need not begin at 0
                    total = builder.add(total, builder.mul(minimum, inputs))
                builder.store(total, place)

    def add_digits(self, digits, sums) -> None:
        """Add the lower digit's sum + 256 x the upper one's to sums."""
        builder = self.builder
        low, high = (doubles(builder, builder.load(place)) for place in digits)
        weight = constant(self.doubles, 256.0)
        for lower, upper, place in zip(low, high, sums, strict=True):
            total = builder.fadd(builder.load(place), lower)
            builder.store(math(builder, "fma", [upper, weight, total]), place)

    def multiply(self, number, block, load, halves, totals) -> None:
        """Multiply some halves of one load of codes by both digits of each row."""
        builder, of_bytes = self.builder, self.vectors.bytes
        first = (self.row, self.stride), (block, self.rows * BLOCK * DIGITS), (load, 4)
        for half, weights in self.codes(number, load, halves).items():
            for digit in range(DIGITS):
                for row, of_row in enumerate(totals):
                    place = self.linear(*first, (digit * self.rows + row) * BLOCK + half * BLOCK // 2)
                    four = builder.load(self.at(1, 0, place, I32), align=1)
                    inputs = builder.bitcast(splat(builder, four, self.vectors.ints), of_bytes)
                    added = self.vectors.add_bytes(builder, builder.load(of_row[digit]), weights, inputs)
                    builder.store(added, of_row[digit])

    def codes(self, number, load, halves) -> dict[int, Any]:
        """Return, by half, the codes of four columns of each lane (`few_bits`)."""
        builder, of_bytes = self.builder, self.vectors.bytes
        size = self.form.bits * of_bytes.count
        at = self.linear((number, size), (load, of_bytes.count))
        raw = builder.load(self.at(0, 0, at, of_bytes), align=1)
        self.prefetch(0, at, size)
        found = {}
        for half in halves:
            code = builder.and_(raw, constant(of_bytes, 15)) if half == 0 else builder.lshr(raw, constant(of_bytes, 4))
            found[half] = code if self.form.bits == 4 else builder.or_(code, self.upper(number, load, half))
        return found

    def upper(self, number, load, half: int):
        """Return the codes' bits above the lower four."""
        builder, bits, words = self.builder, self.form.bits - 4, self.vectors.words
        plane = NIBBLE_LOADS + (half if bits == 2 else 0)
        at = self.linear((number, self.form.bits * self.vectors.bytes.count), plane * self.vectors.bytes.count)
        found = builder.load(self.at(0, 0, at, words), align=1)
        if half == 0:
            self.prefetch(0, at, self.form.bits * self.vectors.bytes.count)
        by = builder.trunc(self.linear((load, bits)), I16)
        found = builder.lshr(found, splat(builder, by, words))
        if half == 0 or bits == 2:
            found = builder.shl(found, constant(words, 4))
        return builder.and_(
            builder.bitcast(found, self.vectors.bytes), constant(self.vectors.bytes, (1 << bits) - 1 << 4)
        )

    def prefetch(self, index: int, at, block_size: int) -> None:
        """Prefetch the same numbers of the next panels. The array has `block_size` of them per panel block."""
        self.bring(0, index, self.linear(at, (self.blocks, block_size)))


def doubles(builder, integers) -> list[Any]:
    """Return the first and second half of the lanes as doubles."""
    half = integers.type.count // 2
    kind = ir.VectorType(F64, half)
    return [builder.sitofp(slice_of(builder, integers, half, number), kind) for number in range(2)]


def row_bytes(builder, blocks):
    """Return the bytes of a row of inputs: blocks are stored in pairs."""
    one = ir.Constant(I64, 1)
    pairs = builder.lshr(builder.add(blocks, one), one)
    return builder.mul(pairs, ir.Constant(I64, 2 * BLOCK * DIGITS))


four_rows, one_row = (kernel(_Emitter, rows) for rows in (ROWS, 1))
