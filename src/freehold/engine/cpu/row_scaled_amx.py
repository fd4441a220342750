"""Sixteen rows of inputs times a group's panels of `row_scaled`, in AMX tile registers (`amx.py`).

A weight is a 16-bit integer: code x scale + minimum. It is split into two digits, signed bytes, once for all inputs of
a portion. Each input digit is multiplied by each weight digit. Products of equal significance share a sum over all
columns: of two lower digits, of a lower and an upper one, and of two upper ones. So nothing is scaled on the way. The
second sum is at most 2 x 65,536 x 128 x 127, with the maximum of columns: a 32-bit integer.

The matrix unit works in parallel if it is kept busy: the digits of the next two blocks are computed between the
products of two blocks with the first 16 rows, and the outputs of 16 rows between the products of the next.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types

from freehold.engine.cpu import amx
from freehold.engine.cpu.amx_only import with_amx
from freehold.engine.cpu.cache_line import LINE
from freehold.engine.cpu.integer_tiles import (
    BLOCK,
    GROUP,
    NIBBLE_LOADS,
    Records,
    write_output,
    write_whole_output,
)
from freehold.engine.cpu.row_scaled_tiles import DIGITS, OFFSET, Kind, row_bytes, write_sums
from freehold.engine.cpu.simd import FLOATS
from freehold.engine.cpu.vectors import I8, I16, I32, I64, SECOND, constant, intrinsic, math, splat

LANES = 16
TILE = amx.TILE
SLAB = TILE * 2 * BLOCK  # bytes in a register: a digit of two blocks
_WORDS, _INTS = ir.VectorType(I16, 2 * LANES), ir.VectorType(I32, LANES)
_SUMS = 2 * DIGITS - 1
PANELS = GROUP // LANES  # of a group
_LEFT, _RIGHT = PANELS * _SUMS, PANELS * _SUMS + 1  # registers after those of sums
_TOP = 1 << 8  # weight of the upper digit


class Rows(NamedTuple):
    """Up to 16 rows of inputs from `first` on, and the first panel of their group."""

    panel: Any
    first: Any
    count: Any


class _Emitter(Records):
    """Emits the product of a group's panels, from `panel` on, and 16 rows of inputs from `row` on. `room` int8 has the
    digits of the group's weights [panels, pairs of blocks, 2 digits, 16, 16 lanes, 4 columns], then the sums of 16 rows
    [panels, counts, 16, 64 bytes]."""

    def __init__(self, context, builder, signature, values, panel=None, row=None):
        super().__init__(context, builder, signature, values)
        self.panel, self.row = panel, row
        self.form, self.has_minimums, _ = Kind.of(signature.args[0])
        self.blocks, self.block_bytes = self.field(0, 4), 4 * self.form.bits * LANES
        self.stride = row_bytes(builder, self.blocks)
        self.pairs = builder.udiv(self.stride, ir.Constant(I64, SLAB * DIGITS // TILE))
        self.sums_at = self.linear((self.pairs, PANELS * DIGITS * SLAB))
        self.places = ir.Constant(I64, -1)  # a mask: which pairs have their own place in `room`

    def sums_of_first(self, are_alone, before: Rows) -> None:
        """Compute the sums of the group's first rows, and its digits, and write outputs of earlier rows. If there are
        no other rows, digits of two pairs at a time suffice, and stay in L1."""
        builder, one = self.builder, ir.Constant(I64, 1)
        self.places = builder.select(are_alone, one, self.places)
        self.clear()
        for unit in self.digits_of(ir.Constant(I64, 0)):
            unit()
        last = builder.sub(self.pairs, one)
        with cgutils.for_range(builder, last) as loop:
            units = self.digits_of(builder.add(loop.index, one))
            self.multiply(loop.index, lambda number: [unit() for unit in units[number :: PANELS * DIGITS * DIGITS]])
            self.write_share(before, loop.index)
            for panel in range(PANELS):
                self.prefetch(self.linear(self.panel, panel, PANELS), loop.index)
        self.multiply(last)
        self.write_share(before, last)
        self.store_sums()

    def sums_of_next(self) -> None:
        """Compute the sums of 16 rows, and write the outputs of the 16 before."""
        builder, tile = self.builder, ir.Constant(I64, TILE)
        before = Rows(self.panel, builder.sub(self.row, tile), tile)
        self.clear()
        with cgutils.for_range(builder, self.pairs) as loop:
            self.multiply(loop.index)
            self.write_share(before, loop.index)
        self.store_sums()

    def place(self, panel: int, pair):
        """Return where a pair's digits are."""
        own = self.builder.and_(pair, self.places)
        return self.linear((self.pairs, panel * DIGITS * SLAB), (own, DIGITS * SLAB))

    # -- digits

    def digits_of(self, pair) -> list[Callable[[], None]]:
        """Return small steps that compute the digits of a pair of blocks. A missing block is zeros."""
        return [one for panel in range(PANELS) for side in range(2) for one in self.digits_of_block(panel, pair, side)]

    def digits_of_block(self, panel: int, pair, side: int) -> list[Callable[[], None]]:
        found: list[Any] = []
        to = self.linear(self.place(panel, pair), side * SLAB // 2)

        def piece(load: int) -> None:
            if not found:
                found.extend(self.block(panel, self.linear((pair, 2), side)))
            self.put_digits(to, load, *found)

        return [partial(piece, load) for load in range(NIBBLE_LOADS)]

    def block(self, panel: int, block):
        """Return where a block's codes are, and its halves' scales and minimums."""
        builder, parts = self.builder, self.form.parts
        is_there = builder.icmp_signed("<", block, self.blocks)
        block = builder.select(is_there, block, builder.sub(self.blocks, ir.Constant(I64, 1)))
        number = self.linear((self.panel, self.blocks), (panel, self.blocks), block)
        found = []
        for part in range(parts):
            at = self.linear((number, parts), part)
            scale = builder.select(is_there, self.in_words(1, at), constant(_WORDS, 0))
            if self.has_minimums:
                minimum = builder.select(is_there, self.in_words(2, at), constant(_WORDS, 0))
            else:
                factor = builder.trunc(builder.neg(self.field(0, OFFSET)), I16)
                minimum = builder.mul(scale, splat(builder, factor, _WORDS))
            # The upper digit is rounded to nearest, since the lower one is signed.
            found.append((scale, builder.add(minimum, constant(_WORDS, _TOP // 2))))
        return self.linear((number, self.block_bytes)), found if parts == 2 else 2 * found

    def put_digits(self, to, load: int, codes_at, of_halves) -> None:
        """Store the digits of one load's columns."""
        builder, low_byte = self.builder, constant(_WORDS, 0xFF)
        for half, (scale, minimum) in enumerate(of_halves):
            even, odd = (
                builder.add(builder.mul(self.code(codes_at, load, half, side), scale), minimum) for side in range(2)
            )
            low = builder.or_(builder.and_(even, low_byte), builder.shl(odd, constant(_WORDS, 8)))
            low = builder.xor(low, constant(_WORDS, 0x8080))
            high = builder.or_(builder.lshr(even, constant(_WORDS, 8)), builder.and_(odd, constant(_WORDS, 0xFF00)))
            for digit, value in enumerate((low, high)):
                place = self.linear(to, digit * SLAB, (NIBBLE_LOADS * half + load) * 4 * LANES)
                builder.store(value, self.array(3, place, _WORDS), align=1)

    def code(self, codes_at, load: int, half: int, side: int):
        """Return codes of every second column (`few_bits`)."""
        code, bits = self.bits(codes_at, load, 8 * side + 4 * half, 0, 15), self.form.bits - 4
        if bits == 0:
            return code
        plane, bit = divmod((half * NIBBLE_LOADS + load) * bits, 8)
        upper = self.bits(codes_at, NIBBLE_LOADS + plane, 8 * side + bit, 4, (1 << bits) - 1 << 4)
        return self.builder.or_(code, upper)

    def bits(self, codes_at, vector: int, bit: int, to: int, mask: int):
        """Move bits of words from one bit to another."""
        builder = self.builder
        at = self.linear(codes_at, vector * 4 * LANES)
        raw = builder.load(self.at(0, 0, at, _WORDS), align=1)
        move = builder.lshr if bit >= to else builder.shl
        return builder.and_(move(raw, constant(_WORDS, abs(bit - to))), constant(_WORDS, mask))

    def in_words(self, index: int, number):
        """Load a number per lane, repeated for its two words of codes."""
        builder = self.builder
        narrow = builder.load(self.at(0, index, self.linear((number, LANES)), ir.VectorType(I16, LANES)), align=2)
        wide = builder.zext(narrow, _INTS)
        return builder.bitcast(builder.or_(wide, builder.shl(wide, constant(_INTS, 16))), _WORDS)

    def prefetch(self, panel, pair) -> None:
        """Prefetch a later panel's weights: memory is read once, while this panel's digits are computed."""
        number = self.linear((panel, self.blocks), (pair, 2))
        for line in range(0, 2 * self.block_bytes, LINE):
            self.bring(0, 0, self.linear((number, self.block_bytes), line), SECOND)
        for index in (1, 2) if self.has_minimums else (1,):
            for part in range(self.form.parts):
                self.bring(0, index, self.linear((number, self.form.parts * LANES), 2 * part * LANES), SECOND)

    # -- sums

    def clear(self) -> None:
        for number in range(PANELS * _SUMS):
            amx.clear(self.builder, number)

    def multiply(self, pair, between: Callable[[int], Any] = lambda number: None) -> None:
        """Multiply a pair of blocks of all panels; after each product, call `between` with its number. An input digit
        stays in its register for all weight digits. Inputs of the next pair are prefetched from L2."""
        builder, done = self.builder, 0
        inputs = self.linear((self.row, self.stride), (pair, DIGITS * SLAB))
        for line in range(0, DIGITS * SLAB, LINE):
            self.bring(1, 0, self.linear(inputs, DIGITS * SLAB, line))
        for left in range(DIGITS):
            amx.load(builder, _LEFT, self.at(1, 0, self.linear(inputs, left * SLAB), I8), 2 * BLOCK)
            for right in range(DIGITS):  # consecutive products never share a sum
                for panel in range(PANELS):
                    place = self.linear(self.place(panel, pair), right * SLAB)
                    amx.load(builder, _RIGHT, self.array(3, place, I8), 4 * LANES)
                    amx.add_product(builder, "ssd", panel * _SUMS + left + right, _LEFT, _RIGHT)
                    between(done)
                    done += 1

    def store_sums(self) -> None:
        for number in range(PANELS * _SUMS):
            place = self.array(3, self.linear(self.sums_at, number * SLAB), I8)
            amx.store(self.builder, number, place, 4 * LANES)

    # -- outputs

    def write_share(self, rows: Rows, pair) -> None:
        """Write a pair's share of the outputs of `rows`, so that all pairs together write all."""
        builder = self.builder
        each = builder.udiv(self.linear(rows.count, self.pairs, -1), self.pairs)
        begin = builder.mul(pair, each)
        left = builder.sub(rows.count, begin)
        self.write(rows, begin, builder.select(builder.icmp_signed("<", left, each), left, each))

    def write(self, rows: Rows, begin, count) -> None:
        """Write outputs of `count` rows, from number `begin` on, whose sums are in `room`."""
        builder = self.builder
        left = builder.sub(self.field(2, 1), self.linear((rows.panel, LANES)))
        is_whole = builder.icmp_signed(">=", left, ir.Constant(I64, PANELS * LANES))
        with builder.if_else(is_whole) as (whole, part):
            for branch, write in ((whole, write_whole_output), (part, write_output)):
                with branch, cgutils.for_range(builder, count) as loop:
                    number = builder.add(begin, loop.index)
                    for panel in range(PANELS):
                        to = self.linear(rows.panel, panel), builder.add(rows.first, number)
                        write_sums(self, *to, self.joined(panel, number), write)

    def joined(self, panel: int, row):
        """Join the sums of a row and a panel, rounded once. The parts below and above 2**24 are exact as floats."""
        builder, eight = self.builder, constant(_INTS, 8)
        parts = []
        for count in range(_SUMS):
            place = self.linear(self.sums_at, (panel * _SUMS + count) * SLAB, (row, 4 * LANES))
            parts.append(builder.load(self.array(3, place, _INTS), align=64))
        low, middle, high = parts
        carried = builder.add(middle, builder.ashr(low, eight))
        upper = builder.ashr(builder.add(high, builder.ashr(carried, eight)), eight)
        lower = builder.add(builder.add(low, builder.shl(middle, eight)), builder.shl(high, constant(_INTS, 16)))
        lower = builder.and_(lower, constant(_INTS, (1 << 24) - 1))
        upper, lower = (builder.sitofp(part, FLOATS) for part in (upper, lower))
        return math(builder, "fma", [upper, constant(FLOATS, float(1 << 24)), lower])


def _define_begin(typingctx, weights):
    """Emit code before products with these weights."""

    def emit(context, builder, signature, values):
        amx.configure(builder, ((TILE, 64),) * amx.REGISTERS)

    return types.void(weights), with_amx(emit)


def _define_first(typingctx, weights, inputs, outputs, room, panel, row, are_alone, before):
    def emit(context, builder, signature, values):
        rows = Rows(*cgutils.unpack_tuple(builder, values[7]))
        _Emitter(context, builder, signature, values, *values[4:6]).sums_of_first(values[6], rows)

    return types.void(weights, inputs, outputs, room, types.intp, types.intp, types.boolean, before), with_amx(emit)


def _define_next(typingctx, weights, inputs, outputs, room, panel, row):
    return types.void(weights, inputs, outputs, room, types.intp, types.intp), with_amx(
        lambda *arguments: _Emitter(*arguments, *arguments[3][4:6]).sums_of_next()
    )


def _define_write(typingctx, weights, inputs, outputs, room, rows):
    def emit(context, builder, signature, values):
        rows = Rows(*cgutils.unpack_tuple(builder, values[4]))
        _Emitter(context, builder, signature, values).write(rows, ir.Constant(I64, 0), rows.count)

    return types.void(weights, inputs, outputs, room, rows), with_amx(emit)


@njit(inline="always")
def room_size(blocks):
    """Return the bytes of `room`."""
    return (blocks + 1) // 2 * PANELS * DIGITS * SLAB + PANELS * _SUMS * SLAB


begin: Any = intrinsic(_define_begin)
sum_first: Any = intrinsic(_define_first)
"""(weights, inputs, outputs, room, panel, row, are_alone, before): compute the digits of the group's weights, from its
first panel on, and the sums of the 16 rows from `row` on, a multiple of 16, both into `room` int8 [`room_size`]. If
these rows `are_alone`, digits are not kept. Outputs are written for the `Rows` before, whose sums `room` holds until
then."""
sum_next: Any = intrinsic(_define_next)
"""(weights, inputs, outputs, room, panel, row): the same with the digits in `room`. Outputs are written for the 16 rows
before."""
write_rows: Any = intrinsic(_define_write)
"""(weights, inputs, outputs, room, rows): write outputs of `Rows` whose sums are in `room`."""
