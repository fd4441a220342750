"""Sixteen rows of inputs times a panel of weights, in AMX tile registers (`amx.py`).

The sums of a block are the same integers as in `integer_tiles`, scaled and added in the same order, so the result is
bit-identical. Weights are widened to bytes once for all inputs, during the products of the first rows, since the matrix
unit works in parallel. 16-bit inputs are two planes of bytes, the upper one signed: a block of a tile is [planes, 16
rows, 32 columns].
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from freehold.engine.cpu import amx
from freehold.engine.cpu.amx_only import with_amx
from freehold.engine.cpu.cache_line import LINE
from freehold.engine.cpu.integer_tiles import BLOCK, Records, write_output, write_whole_output
from freehold.engine.cpu.vectors import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    SECOND,
    constant,
    in_turns,
    intrinsic,
    math,
    splat,
)

LANES = 16
TILE = amx.TILE
PLANE = TILE * BLOCK  # bytes
PANEL_BLOCK = LANES * BLOCK  # bytes
_FLOATS, _INTS, _HALVES = (ir.VectorType(kind, LANES) for kind in (F32, I32, F16))
_TWO_BLOCKS = ((TILE, 64),) * 4  # the sums of two blocks, each of two planes
_SLOT_BYTES = 4 * TILE * 64
_LEFT, _RIGHT = 4, 6  # the first of two registers each


def _parts(weights) -> int:
    """Return the number of parts of a block with a scale each."""
    return 2 if weights.types[1].dtype == types.float32 and weights.types[0].dtype == types.int8 else 1


def _define_begin(typingctx, weights):
    """Emit code before products with these weights."""

    def emit(context, builder, signature, values):
        depth = BLOCK // _parts(weights)
        amx.configure(builder, (*_TWO_BLOCKS, *((TILE, depth),) * 2, *((depth // 4, 64),) * 2))

    return types.void(weights), with_amx(emit)


class _Emitter(Records):
    """Emits the product of a panel and up to 16 `rows` of inputs from `row` on. `room` holds its signed bytes [blocks,
    8, 16 lanes, 4 columns], which are written first if `widens`."""

    def __init__(self, context, builder, signature, values, widens: bool):
        super().__init__(context, builder, signature, values)
        self.widens = widens
        self.blocks, self.panel, self.row, self.rows = self.field(0, 3), *values[4:7]
        self.planes = 1 if signature.args[1].types[0].dtype == types.int8 else 2
        self.is_fine = signature.args[0].types[1].dtype == types.float32
        self.is_nibbles = signature.args[0].types[0].dtype == types.uint8
        self.has_minimums = self.is_nibbles or self.is_fine
        self.parts = _parts(signature.args[0])
        self.sums = builder.bitcast(self._room(2 * _SLOT_BYTES // 4, I32), I8.as_pointer())

    def _room(self, count: int, kind):
        room = cgutils.alloca_once(self.builder, ir.ArrayType(kind, count))
        room.align = 64
        return room

    def emit(self) -> None:
        builder = self.builder
        results = [cgutils.alloca_once(builder, _FLOATS) for _ in range(TILE)]
        for result in results:
            builder.store(constant(_FLOATS, 0.0), result)
        one, zero = ir.Constant(I64, 1), ir.Constant(I64, 0)
        pairs = self.blocks if self.parts == 2 else builder.lshr(self.blocks, one)
        last = builder.sub(pairs, one)
        self.widen_pair(zero, pairs)
        with builder.if_then(builder.icmp_signed(">", pairs, zero)):
            self.multiply_pair(zero, zero)
        self.widen_pair(one, pairs)
        with cgutils.for_range(builder, pairs) as loop:
            more = builder.add(loop.index, one)
            more = builder.select(builder.icmp_signed("<", more, last), more, last)
            self.multiply_pair(more, builder.and_(builder.add(loop.index, one), one))
            self.widen_pair(self.linear(loop.index, 2), pairs)
            self.finish_pair(loop.index, builder.and_(loop.index, one), results)
        if self.parts == 1:
            with builder.if_then(builder.trunc(self.blocks, ir.IntType(1))):
                block = builder.sub(self.blocks, one)
                self.widen(block)
                self.multiply(0, block, 0, zero)
                self.finish(0, block, 0, zero, results)
        self.write(results)

    def pair(self, number):
        """Return what is multiplied together: two blocks, or both parts of one."""
        if self.parts == 2:
            return [(number, 0), (number, 1)]
        return [(self.linear((number, 2), side), 0) for side in range(2)]

    def widen_pair(self, number, pairs) -> None:
        if self.widens:
            with self.builder.if_then(self.builder.icmp_signed("<", number, pairs)):
                for block in dict.fromkeys(block for block, _ in self.pair(number)):
                    self.widen(block)

    def widen(self, block) -> None:
        if not self.widens:
            return
        builder = self.builder
        size = PANEL_BLOCK // 2 if self.is_nibbles else PANEL_BLOCK
        raw = ir.VectorType(I8, 64) if self.is_nibbles else ir.VectorType(I16, LANES)
        number = self.linear((self.panel, self.blocks), block)
        first = self.linear((number, size))
        for line in range(0, size, LINE):  # of the next panel
            self.bring(0, 0, self.linear(first, (self.blocks, size), line), SECOND)

        def read(number):
            at = self.linear(first, number * raw.count * raw.element.width // 8)
            return builder.load(self.at(0, 0, at, raw), align=1)

        for step in range(4 if self.is_nibbles else 8):
            if self.is_nibbles:
                code = read(step)
                quarters = {
                    step: builder.and_(code, constant(raw, 15)),
                    4 + step: builder.lshr(code, constant(raw, 4)),
                }
            else:
                quarters = {step: in_turns(builder, read(2 * step), read(2 * step + 1))}
            for number, quarter in quarters.items():
                place = self.linear((block, PANEL_BLOCK), number * 64)
                builder.store(quarter, self.array(3, place, quarter.type), align=1)

    def multiply_pair(self, number, slot) -> None:
        """Multiply a pair while the previous one is scaled, in two slots for sums."""
        for side, (block, part) in enumerate(self.pair(number)):
            self.multiply(side, block, part, slot)

    def finish_pair(self, number, slot, results) -> None:
        for side, (block, part) in enumerate(self.pair(number)):
            self.finish(side, block, part, slot, results)

    def multiply(self, side: int, block, part: int, slot) -> None:
        builder, depth = self.builder, BLOCK // self.parts
        weights = self.array(3, self.linear((block, PANEL_BLOCK), part * depth * LANES), I8)
        amx.load(builder, _RIGHT + side, weights, 64)
        codes = self.at(1, 0, self.linear((self.row, self.blocks, BLOCK), (block, PLANE)), I8)
        for plane in range(self.planes):
            inputs = builder.gep(codes, [ir.Constant(I64, plane * PLANE + part * depth)])
            total, is_lower = 2 * side + plane, plane + 1 < self.planes
            left = _LEFT + (side if self.planes == 1 else plane)
            amx.load(builder, left, inputs, BLOCK)
            amx.clear(builder, total)
            amx.add_product(builder, "usd" if is_lower else "ssd", total, left, _RIGHT + side)
            amx.store(builder, total, self._sum(side, plane, 0, slot), 64)

    def _sum(self, side: int, plane: int, row: int, slot):
        at = ((2 * side + plane) * TILE + row) * 64
        return self.builder.gep(self.sums, [self.linear((slot, _SLOT_BYTES), at)])

    def _integers(self, side: int, row: int, slot):
        def read(plane):
            where = self.builder.bitcast(self._sum(side, plane, row, slot), _INTS.as_pointer())
            return self.builder.load(where, align=64)

        if self.planes == 1:
            return read(0)
        upper = self.builder.shl(read(1), constant(_INTS, 8))
        return self.builder.add(upper, read(0))

    def finish(self, side: int, block, part: int, slot, results) -> None:
        """Scale as in `integer_tiles`: result += total x both scales, and, once a block, its minimum x the sum of
        inputs."""
        builder = self.builder
        number = self.linear((self.panel, self.blocks), block)
        scale = self._of_weights(1, self.linear((number, self.parts * LANES), part * LANES))
        has_minimum = self.has_minimums and part == 0
        minimum = self._of_weights(2, self.linear((number, LANES))) if has_minimum else None
        first = self.linear((self.row, self.blocks), (block, TILE))
        for row, result in enumerate(results):
            value = builder.load(result)
            if minimum is not None:
                value = math(builder, "fma", [minimum, self._of_inputs(2, first, row), value])
            integers = builder.sitofp(self._integers(side, row, slot), _FLOATS)
            both = builder.fmul(scale, self._of_inputs(1, first, row))
            builder.store(math(builder, "fma", [integers, both, value]), result)

    def _of_weights(self, index: int, at):
        if self.kinds[0].types[index].dtype == types.float32:
            return self.builder.load(self.at(0, index, at, _FLOATS), align=4)
        return self.builder.fpext(self.builder.load(self.at(0, index, at, _HALVES), align=2), _FLOATS)

    def _of_inputs(self, index: int, first, row: int):
        number = self.builder.load(self.at(1, index, self.linear(first, row), F32))
        return splat(self.builder, number, _FLOATS)

    def write(self, results) -> None:
        """Write results. The last tile may have fewer rows, and the last panel fewer columns."""
        builder = self.builder
        has_columns = builder.icmp_signed(">=", self.field(2, 1), self.linear((self.panel, LANES), LANES))
        is_whole = builder.and_(has_columns, builder.icmp_signed("==", self.rows, ir.Constant(I64, TILE)))
        with builder.if_else(is_whole) as (whole, part):
            with whole:
                for row, result in enumerate(results):
                    write_whole_output(self, self.panel, self.linear(self.row, row), builder.load(result))
            with part:
                found = builder.bitcast(self._room(TILE * LANES, F32), _FLOATS.as_pointer())
                for row, result in enumerate(results):
                    builder.store(builder.load(result), builder.gep(found, [ir.Constant(I64, row)]), align=64)
                with cgutils.for_range(builder, self.rows) as loop:
                    result = builder.load(builder.gep(found, [loop.index]), align=64)
                    write_output(self, self.panel, self.linear(self.row, loop.index), result)


def _rows(widens: bool) -> Any:
    def define(typingctx, weights, inputs, outputs, room, panel, row, rows):
        def emit(context, builder, signature, values):
            _Emitter(context, builder, signature, values, widens).emit()

        return types.void(weights, inputs, outputs, room, types.intp, types.intp, types.intp), with_amx(emit)

    return intrinsic(define)


begin: Any = intrinsic(_define_begin)
first_rows, next_rows = (_rows(widens) for widens in (True, False))
"""(weights, inputs, outputs, room, panel, row, rows). `row` is a multiple of 16; `rows` output rows are written. `room`
int8 [blocks * 512] holds the panel's weights after the first rows."""
