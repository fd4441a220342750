"""Attention products in AMX tile registers (`amx.py`), for bfloat16 KV.

Queries and probabilities are bfloat16 as well. A right factor is paired: keys by neighbouring numbers, values by
neighbouring positions. A row does not depend on which other rows are multiplied with it. Few rows are multiplied as
floats, in the order in which the registers add (`attention_amx_rows`).
"""

from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types

from freehold.engine.cpu import amx
from freehold.engine.cpu.amx_only import is_amx, with_amx
from freehold.engine.cpu.integer_tiles import Records
from freehold.engine.cpu.softmax import KEYS
from freehold.engine.cpu.vectors import F32, I16, I64, constant, in_turns, intrinsic

LANES = 16
TILE = amx.TILE
DEPTH = 32  # bfloat16 numbers in a row of a register
VALUES = 4 * LANES  # columns of values that are multiplied together
_SUMS = 4  # registers, from the first on
_LEFT, _RIGHT = 4, 5  # the first of two registers
_FLOATS = ir.VectorType(F32, LANES)


class _Emitter(Records):
    def bfloats(self, argument: int, at):
        return self.array(argument, at, I16)

    def floats(self, argument: int, at):
        return self.array(argument, at, _FLOATS)

    def add_products(self, chunks, left, right) -> None:
        """Add left x right to registers 0 to 3, summed over `chunks`. left(chunk) and right(number, chunk) return a
        factor's address and its stride in bytes."""
        builder = self.builder
        with cgutils.for_range(builder, chunks) as loop:
            amx.load(builder, _LEFT, *left(loop.index))
            for number in range(_SUMS):
                register = _RIGHT + number % 2
                amx.load(builder, register, *right(number, loop.index))
                amx.add_product(builder, "f16ps", number, _LEFT, register)


def _where_possible(emit):
    """Emit only if the instruction set, the intrinsic's first argument, has the registers."""
    return with_amx(lambda *arguments: emit(_Emitter(*arguments)))


def _define_can(typingctx, isa, keys):
    def codegen(context, builder, signature, values):
        return ir.Constant(ir.IntType(1), int(is_amx(isa) and keys.dtype == types.uint16))

    return types.boolean(isa, keys), codegen


def _define_begin(typingctx, isa, is_wanted, rows):
    def emit(records):
        rows = records.values[2]
        with records.builder.if_then(records.values[1]):
            amx.configure(records.builder, (*((rows, 64),) * 5, *((DEPTH // 2, 64),) * 2))

    return types.void(isa, types.boolean, types.intp), _where_possible(emit)


def _define_end(typingctx, isa, is_wanted):
    def emit(records):
        with records.builder.if_then(records.values[1]):
            amx.release(records.builder)

    return types.void(isa, types.boolean), _where_possible(emit)


def _define_pair(typingctx, isa, source, at, stride, target, to, count, valid):
    """Interleave pairs of the first `count` rows of 16 numbers, `stride` numbers apart. Rows from `valid` on are
    zeros."""

    def emit(records):
        builder = records.builder
        words = ir.VectorType(I16, LANES)
        _, _, first, stride, _, to, count, valid = records.values
        with cgutils.for_range(builder, builder.lshr(count, ir.Constant(I64, 1))) as loop:
            rows = []
            for side in range(2):
                row = records.linear((loop.index, 2), side)
                found = builder.load(records.array(1, records.linear(first, (row, stride)), words), align=2)
                rows.append(builder.select(builder.icmp_signed("<", row, valid), found, constant(words, 0)))
            both = in_turns(builder, *rows)
            place = records.linear(to, (loop.index, 2 * LANES))
            builder.store(both, records.array(4, place, both.type), align=2)

    numbers = types.intp
    return types.void(isa, source, numbers, numbers, target, numbers, numbers, numbers), _where_possible(emit)


def _define_score(typingctx, isa, queries, row, size, keys, scores):
    """Compute scores [16, KEYS] of the rows from `row` on: queries [rows, size], keys [4, size / 2, 16, 2]."""

    def emit(records):
        builder = records.builder
        _, _, row, size, _, _ = records.values

        def left(chunk):
            return records.bfloats(1, records.linear((row, size), (chunk, DEPTH))), records.linear((size, 2))

        def right(number, chunk):
            return records.bfloats(4, records.linear((size, LANES * number), (chunk, DEPTH * LANES))), 64

        for number in range(_SUMS):
            amx.clear(builder, number)
        records.add_products(builder.sdiv(size, ir.Constant(I64, DEPTH)), left, right)
        for number in range(_SUMS):
            place = records.array(5, ir.Constant(I64, number * LANES), F32)
            amx.store(builder, number, place, KEYS * 4)

    return types.void(isa, queries, types.intp, types.intp, keys, scores), _where_possible(emit)


def _define_weigh(typingctx, isa, weights, values, column, sums, row, rows, height, size):
    """Add to sums [rows, size], in columns `column` to `column + VALUES` of `rows` rows from `row` on, the product of
    weights [16, KEYS] and values [size / 16, KEYS / 2, 16, 2]. Registers have `height` rows."""

    def emit(records):
        builder = records.builder
        _, _, _, column, _, row, rows, height, size = records.values
        room = cgutils.alloca_once(builder, ir.ArrayType(F32, TILE * VALUES))
        room.align = 64
        beside = builder.bitcast(room, F32.as_pointer())
        is_whole = builder.icmp_signed("==", rows, height)
        place = builder.select(is_whole, records.array(4, records.linear((row, size), column), F32), beside)
        stride = builder.select(is_whole, records.linear((size, 4)), ir.Constant(I64, VALUES * 4))

        def each_vector():
            """Yield the addresses of a row's sums and of their copies, vector by vector."""
            with cgutils.for_range(builder, rows) as loop:
                for number in range(_SUMS):
                    at = records.linear((row, size), (loop.index, size), column, number * LANES)
                    other = builder.gep(beside, [records.linear((loop.index, VALUES), number * LANES)])
                    yield records.floats(4, at), builder.bitcast(other, _FLOATS.as_pointer())

        def left(chunk):
            return records.bfloats(1, records.linear((chunk, DEPTH))), KEYS * 2

        def right(number, chunk):
            panel = records.linear((column, KEYS), number * KEYS * LANES)
            return records.bfloats(2, records.linear(panel, (chunk, DEPTH * LANES))), 64

        with builder.if_then(builder.not_(is_whole)):
            for sums, other in each_vector():
                builder.store(builder.load(sums, align=4), other, align=64)
        for number in range(_SUMS):
            amx.load(builder, number, builder.gep(place, [ir.Constant(I64, number * LANES)]), stride)
        records.add_products(ir.Constant(I64, KEYS // DEPTH), left, right)
        for number in range(_SUMS):
            amx.store(builder, number, builder.gep(place, [ir.Constant(I64, number * LANES)]), stride)
        with builder.if_then(builder.not_(is_whole)):
            for sums, other in each_vector():
                builder.store(builder.load(other, align=64), sums, align=4)

    numbers = types.intp
    kinds = isa, weights, values, numbers, sums, numbers, numbers, numbers, numbers
    return types.void(*kinds), _where_possible(emit)


_can: Any = intrinsic(_define_can)
begin: Any = intrinsic(_define_begin)
"""(isa, is_wanted, rows): before products of up to 16 rows."""
end: Any = intrinsic(_define_end)
"""(isa, is_wanted): after products."""
_pair: Any = intrinsic(_define_pair)
_score: Any = intrinsic(_define_score)
_weigh: Any = intrinsic(_define_weigh)


@njit(inline="always")
def can_multiply(isa, keys, heads):
    """Return whether these heads can use tile products."""
    return _can(isa, keys) and heads.size % DEPTH == 0 and heads.value_size % VALUES == 0 and not heads.is_latent


@njit(inline="always")
def pair_keys(isa, keys, tile, size, room, number):
    """Pair the 16 keys at `tile`, as tile `number` of four in `room`."""
    _pair(isa, keys, tile, LANES, room, number * size * LANES, size, size)


@njit(inline="always")
def pair_values(isa, values, tile, size, room, number, count):
    """Pair the first `count` of the 16 values at `tile`, as tile `number` of four in `room`, padded with zeros."""
    for panel in range(size // LANES):
        to = (panel * KEYS + number * LANES) * LANES
        _pair(isa, values, tile + panel * LANES, size, room, to, LANES, count)


@njit(inline="always")
def score_rows(isa, queries, row, size, keys, scores):
    """Compute scores [16, KEYS] of the 16 rows from `row` on."""
    _score(isa, queries, row, size, keys, scores)


@njit(inline="always")
def weigh_rows(isa, weights, values, sums, row, rows, height, size):
    """Add weights [16, KEYS] times values to sums of rows `row` up to `row + rows`, with registers of `height` rows."""
    for column in range(0, size, VALUES):
        _weigh(isa, weights, values, column, sums, row, rows, height, size)
