"""Sixteen rows of inputs times the panels of a group of `row_scaled`, in the matrix registers of AMX (`amx.py`).

A weight is an integer of 16 bits: code x scale + minimum. It becomes two digits, signed bytes, once for all inputs.
Each digit of inputs meets each digit of weights. Products that count the same share a sum over all columns: those of
two lower digits, of a lower and an upper one, and of two upper ones. So nothing has to be scaled on the way. The second
sum is 2 x 65,536 x 128 x 127 at most, with as many columns as there may be: an integer of 32 bits.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from freehold.engine.cpu import amx
from freehold.engine.cpu.amx_only import with_amx
from freehold.engine.cpu.integer_tiles import BLOCK, GROUP, NIBBLE_LOADS, Records
from freehold.engine.cpu.row_scaled_tiles import DIGITS, row_bytes, write_sums
from freehold.engine.cpu.simd import FLOATS
from freehold.engine.cpu.vectors import I8, I16, I32, I64, constant, intrinsic, math

LANES = 16
TILE = amx.TILE
SLAB = TILE * 2 * BLOCK  # bytes: what a register holds, a digit of two blocks
_WORDS, _INTS = ir.VectorType(I16, 2 * LANES), ir.VectorType(I32, LANES)
_SUMS = 2 * DIGITS - 1
PANELS = GROUP // LANES  # of a group
_LEFT, _RIGHT = PANELS * _SUMS, PANELS * _SUMS + 1  # registers behind those of sums
_TOP = 1 << 8  # what the upper digit counts


class _Widener(Records):
    """Emits: a panel's weights as digits, in `room` int8 [pairs of blocks, 2 digits, 16, 16 lanes, 4 columns]."""

    def emit(self) -> None:
        builder, blocks = self.builder, self.field(0, 4)
        with cgutils.for_range(builder, blocks) as loop:
            self.widen(loop.index, self.linear((self.values[1], blocks), loop.index))
        with builder.if_then(builder.trunc(blocks, ir.IntType(1))):
            for step in range(2 * NIBBLE_LOADS):
                for digit in range(DIGITS):
                    self.put(blocks, step, digit, constant(_WORDS, 0))

    def widen(self, block, number) -> None:
        builder = self.builder
        scale, minimum = self.in_words(1, number), self.in_words(2, number)
        # The upper digit is rounded to the nearest, as the lower one is signed.
        minimum = builder.add(minimum, constant(_WORDS, _TOP // 2))
        for load in range(NIBBLE_LOADS):
            at = self.linear((number, NIBBLE_LOADS * 4 * LANES), load * 4 * LANES)
            raw = builder.load(self.at(0, 0, at, _WORDS), align=1)
            for half in range(2):
                even, odd = (
                    builder.add(builder.mul(self.nibble(raw, 4 * half + 8 * side), scale), minimum) for side in range(2)
                )
                low = builder.or_(builder.and_(even, constant(_WORDS, 0xFF)), builder.shl(odd, constant(_WORDS, 8)))
                low = builder.xor(low, constant(_WORDS, 0x8080))
                high = builder.or_(builder.lshr(even, constant(_WORDS, 8)), builder.and_(odd, constant(_WORDS, 0xFF00)))
                for digit, value in enumerate((low, high)):
                    self.put(block, NIBBLE_LOADS * half + load, digit, value)

    def nibble(self, raw, bits: int):
        """Of every second byte."""
        return self.builder.and_(self.builder.lshr(raw, constant(_WORDS, bits)), constant(_WORDS, 15))

    def in_words(self, index: int, number):
        """A number of each lane, twice, for there are two words of codes."""
        builder = self.builder
        narrow = builder.load(self.at(0, index, self.linear((number, LANES)), ir.VectorType(I16, LANES)), align=2)
        wide = builder.zext(narrow, _INTS)
        return builder.bitcast(builder.or_(wide, builder.shl(wide, constant(_INTS, 16))), _WORDS)

    def put(self, block, step: int, digit: int, value) -> None:
        one = ir.Constant(I64, 1)
        pair, side = self.builder.lshr(block, one), self.builder.and_(block, one)
        at = self.linear((pair, DIGITS * SLAB), digit * SLAB, (side, SLAB // 2), step * 4 * LANES)
        self.builder.store(value, self.array(2, at, _WORDS), align=1)


class _Emitter(Records):
    """Emits: rows `row` up to `row + rows`, 16 at most, of inputs meet the panels of a group that are in `room`."""

    def emit(self) -> None:
        builder = self.builder
        panel, row, rows = self.values[4:7]
        stride = row_bytes(builder, self.field(0, 4))
        pairs = builder.udiv(stride, ir.Constant(I64, SLAB * DIGITS // TILE))
        for number in range(PANELS * _SUMS):
            amx.clear(builder, number)
        with cgutils.for_range(builder, pairs) as loop:
            self.multiply(self.linear((row, stride), (loop.index, DIGITS * SLAB)), loop.index, pairs)
            for number in range(PANELS):
                self.prefetch(self.linear(panel, number, PANELS), loop.index)
        room = cgutils.alloca_once(builder, ir.ArrayType(I32, PANELS * _SUMS * TILE * LANES))
        room.align = 64
        found = builder.bitcast(room, I8.as_pointer())
        for number in range(PANELS * _SUMS):
            amx.store(builder, number, builder.gep(found, [ir.Constant(I64, number * SLAB)]), 4 * LANES)
        with cgutils.for_range(builder, rows) as loop:
            for number in range(PANELS):
                sums = self.joined(found, number, loop.index)
                write_sums(self, self.linear(panel, number), builder.add(row, loop.index), sums)

    def multiply(self, inputs, pair, pairs) -> None:
        """A pair of blocks of both panels. A digit of inputs stays in its register while those of weights go by."""
        builder = self.builder
        for left in range(DIGITS):
            amx.load(builder, _LEFT, self.at(1, 0, self.linear(inputs, left * SLAB), I8), 2 * BLOCK)
            for right in range(DIGITS):  # no two products after one another are for one sum
                for number in range(PANELS):
                    place = self.linear((pairs, number * DIGITS * SLAB), (pair, DIGITS * SLAB), right * SLAB)
                    amx.load(builder, _RIGHT, self.array(3, place, I8), 4 * LANES)
                    amx.add_product(builder, "ssd", number * _SUMS + left + right, _LEFT, _RIGHT)

    def joined(self, found, number: int, row):
        """The sums of a row and a panel, rounded once. What is below 2**24, and what is above, are floats exactly."""
        builder, eight = self.builder, constant(_INTS, 8)
        parts = []
        for count in range(_SUMS):
            place = builder.gep(found, [self.linear((number * _SUMS + count) * SLAB, (row, 4 * LANES))])
            parts.append(builder.load(builder.bitcast(place, _INTS.as_pointer()), align=64))
        low, middle, high = parts
        carried = builder.add(middle, builder.ashr(low, eight))
        upper = builder.ashr(builder.add(high, builder.ashr(carried, eight)), eight)
        lower = builder.add(builder.add(low, builder.shl(middle, eight)), builder.shl(high, constant(_INTS, 16)))
        lower = builder.and_(lower, constant(_INTS, (1 << 24) - 1))
        upper, lower = (builder.sitofp(part, FLOATS) for part in (upper, lower))
        return math(builder, "fma", [upper, constant(FLOATS, float(1 << 24)), lower])

    def prefetch(self, panel, pair) -> None:
        """Bring a later panel's weights while products are computed: only widening them reads memory."""
        number = self.linear((panel, self.field(0, 4)), (pair, 2))
        for line in range(2 * NIBBLE_LOADS):
            self.bring(0, 0, self.linear((number, NIBBLE_LOADS * 4 * LANES), line * 4 * LANES))
        for index in (1, 2):
            self.bring(0, index, self.linear((number, LANES)))


def _define_begin(typingctx, weights):
    """Before products with these weights."""

    def emit(context, builder, signature, values):
        amx.configure(builder, ((TILE, 64),) * amx.REGISTERS)

    return types.void(weights), with_amx(emit)


def _define_widen(typingctx, weights, panel, room):
    def emit(context, builder, signature, values):
        _Widener(context, builder, signature, values).emit()

    return types.void(weights, types.intp, room), with_amx(emit)


def _define_rows(typingctx, weights, inputs, outputs, room, panel, row, rows):
    def emit(context, builder, signature, values):
        _Emitter(context, builder, signature, values).emit()

    return types.void(weights, inputs, outputs, room, types.intp, types.intp, types.intp), with_amx(emit)


begin: Any = intrinsic(_define_begin)
widen: Any = intrinsic(_define_widen)
"""(weights, panel, room): a panel of `Weights` as digits, in `room` int8 [pairs of blocks * 2,048]."""
sixteen_rows: Any = intrinsic(_define_rows)
"""(weights, inputs, outputs, room, panel, row, rows). The panels of a group, the first of which is `panel`, are in
`room` one behind the other. `row` is a multiple of 16; outputs get `rows` rows."""
