"""Attention products of bfloat16 pairs with AVX512-BF16: twice as many per instruction as of floats.

A product of a pair is two fused multiply-adds, the second number's first, so it is bit-identical to `attention_tiles`.
Keys are paired by numbers, values by positions, once for all rows of an item, which pays from a few rows on.
"""

from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import cgutils, types

from freehold.engine.cpu.attention_tiles import HEIGHT, PANELS, TILES
from freehold.engine.cpu.integer_tiles import Records
from freehold.engine.cpu.isa import Avx512Bf16
from freehold.engine.cpu.only_for import only_for, set_of
from freehold.engine.cpu.simd import FLOATS, LANES
from freehold.engine.cpu.softmax import KEYS
from freehold.engine.cpu.vectors import I16, I32, I64, call, constant, in_turns, intrinsic, splat

_INTS, _WORDS = ir.VectorType(I32, LANES), ir.VectorType(I16, LANES)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


def _is(fact: bool):
    """Return the code of a boolean known at compile time."""
    return lambda context, builder, signature, values: ir.Constant(ir.IntType(1), int(fact))


def _define_rounds(typingctx, keys):
    return types.boolean(keys), _is(keys.dtype == types.uint16)


def _define_has_pairs(typingctx, keys, isa):
    return types.boolean(keys, isa), _is(keys.dtype == types.uint16 and set_of(isa) is Avx512Bf16)


rounds: Any = intrinsic(_define_rounds)
"""(keys): whether queries and probabilities are rounded to bfloat16, as keys are."""
has_pairs: Any = intrinsic(_define_has_pairs)
"""(keys, isa): whether paired products are available."""


def add_pairs(builder, total, a, b):
    """Return total + the second number of each pair of `a` times that of `b` + the first times the first."""
    pairs = [builder.bitcast(one, _PAIRS) for one in (a, b)]
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, *pairs])


class _Emitter(Records):
    def ints(self, argument: int, at):
        """Load 16 pairs of words."""
        return self.builder.load(self.array(argument, at, _INTS), align=4)

    def all_of(self, argument: int, at):
        """Load one pair of words into all lanes."""
        return splat(self.builder, self.builder.load(self.array(argument, at, I32), align=2), _INTS)

    def multiply(self, sums, factors, vectors) -> None:
        """Add to sums [rows][panels] a pair of each row times vectors [panels] of pairs."""
        for of_row, factor in zip(sums, factors, strict=True):
            for place, vector in zip(of_row, vectors, strict=True):
                self.builder.store(add_pairs(self.builder, self.builder.load(place), factor, vector), place)

    def places(self, panels: int):
        return [[cgutils.alloca_once(self.builder, FLOATS) for _ in range(panels)] for _ in range(HEIGHT)]


def _where_possible(emit):
    """Emit only if the instruction set, the intrinsic's first argument, has these instructions."""
    return only_for(Avx512Bf16, lambda *arguments: emit(_Emitter(*arguments)))


def _define_interleave(typingctx, source, at, second_at, has_second, target, to):
    def codegen(context, builder, signature, values):
        records = Records(context, builder, signature, values)
        first, second = (builder.load(records.array(0, values[i], _WORDS), align=2) for i in (1, 2))
        both = in_turns(builder, first, builder.select(values[3], second, constant(_WORDS, 0)))
        builder.store(both, records.array(4, values[5], both.type), align=2)
        return context.get_dummy_value()

    numbers = types.intp
    return types.void(source, numbers, numbers, types.boolean, target, numbers), codegen


def _define_score(typingctx, isa, queries, at, size, keys, scores):
    def emit(emitter):
        builder = emitter.builder
        _, _, first, length, _, _ = emitter.values
        sums = emitter.places(TILES)
        for of_row in sums:
            for place in of_row:
                builder.store(constant(FLOATS, 0.0), place)
        with cgutils.for_range(builder, builder.lshr(length, ir.Constant(I64, 1))) as loop:
            begin = emitter.linear((loop.index, 2 * KEYS))
            vectors = [emitter.ints(4, emitter.linear(begin, tile * 2 * LANES)) for tile in range(TILES)]
            factors = [
                emitter.all_of(1, emitter.linear(first, (length, row), (loop.index, 2))) for row in range(HEIGHT)
            ]
            emitter.multiply(sums, factors, vectors)
        for row, of_row in enumerate(sums):
            for tile, place in enumerate(of_row):
                to = emitter.array(5, ir.Constant(I64, row * KEYS + tile * LANES), FLOATS)
                builder.store(builder.load(place), to, align=4)

    return types.void(isa, queries, types.intp, types.intp, keys, scores), _where_possible(emit)


def _weigh(panels: int) -> Any:
    def define(typingctx, isa, weights, values, pairs, size, column, sums, to):
        def emit(emitter):
            builder = emitter.builder
            _, _, _, count, length, first, _, target = emitter.values

            def place(row, panel):
                return emitter.array(6, emitter.linear(target, first, (length, row), panel * LANES), FLOATS)

            totals = emitter.places(panels)
            for row, of_row in enumerate(totals):
                for panel, total in enumerate(of_row):
                    builder.store(builder.load(place(row, panel), align=4), total)
            with cgutils.for_range(builder, count) as loop:
                begin = emitter.linear((loop.index, length, 2), (first, 2))
                vectors = [emitter.ints(2, emitter.linear(begin, panel * 2 * LANES)) for panel in range(panels)]
                factors = [emitter.all_of(1, emitter.linear((loop.index, 2), row * KEYS)) for row in range(HEIGHT)]
                emitter.multiply(totals, factors, vectors)
            for row, of_row in enumerate(totals):
                for panel, total in enumerate(of_row):
                    builder.store(builder.load(total), place(row, panel), align=4)

        numbers = types.intp
        kinds = isa, weights, values, numbers, numbers, numbers, sums, numbers
        return types.void(*kinds), _where_possible(emit)

    return intrinsic(define)


_interleave: Any = intrinsic(_define_interleave)
_score: Any = intrinsic(_define_score)
_weigh_wide, _weigh_one = (_weigh(panels) for panels in (PANELS, 1))


@njit(nogil=True, error_model="numpy")
def pair_block(scratch, found, size, value_size, count):
    """Pair a block's keys [size / 2, KEYS, 2] and its first `count` values [KEYS / 2, size, 2], padding an odd one with
    zeros."""
    keys, values = scratch.paired_keys, scratch.paired_values
    for tile in range(TILES):
        start, value_start = found.key_starts[tile], found.value_starts[tile]
        for k in range(0, size, 2):
            at = start + k * LANES
            _interleave(found.keys, at, at + LANES, True, keys, k * KEYS + tile * 2 * LANES)
        for key in range(0, min(LANES, count - tile * LANES), 2):
            row, has_second = tile * LANES + key, tile * LANES + key + 1 < count
            for k in range(0, value_size, LANES):
                at, to = value_start + key * value_size + k, (row * value_size + 2 * k)
                _interleave(found.values, at, at + value_size, has_second, values, to)


@njit(nogil=True, error_model="numpy")
def score_pairs(isa, queries, at, size, keys, scores):
    """Compute scores [HEIGHT, KEYS] of the queries [HEIGHT, size] from `at` on with a block of keys."""
    _score(isa, queries, at, size, keys, scores)


@njit(nogil=True, error_model="numpy")
def weigh_pairs(isa, weights, values, count, size, sums, to):
    """Add to sums [HEIGHT, size], from `to` on, weights [HEIGHT, KEYS] times the first `count` values of a block."""
    whole, pairs = size - size % (PANELS * LANES), (count + 1) // 2
    for column in range(0, whole, PANELS * LANES):
        _weigh_wide(isa, weights, values, pairs, size, column, sums, to)
    for column in range(whole, size, LANES):
        _weigh_one(isa, weights, values, pairs, size, column, sums, to)
