"""The inner loops of `integer_linear`: four rows of inputs times a panel of weights, or one row times four panels.

Both have four sums, one for each pair of a panel and a row. Inside a block of 32 columns sums are integers, exact.
What differs between formats is how a load of codes becomes vectors that meet inputs (`_Format`). The rest is one
description, from which the instructions of each kernel are made. On a processor with AVX2 the products are its
instructions; elsewhere LLVM makes something of the same arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from freehold.engine.cpu.vectors import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    call,
    constant,
    intrinsic,
    math,
    pairwise,
    pointer,
    splat,
)

LANES = 8  # rows of a panel
PANELS = 4  # of a group
BLOCK = 32  # columns that share a scale
ROWS = 4  # of inputs, whose blocks stand side by side
# In which words of a block are kept for weights of four bits: those that meet in one instruction stand together.
ORDER = np.array([16 * (t % 2) + 4 * j + t // 2 + 2 * i for j in range(4) for t in range(4) for i in range(2)])
HAS_AVX2 = bool(llvm.get_host_cpu_features().get("avx2"))

BYTES, WORDS, INTS = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, LANES)
HALVES, FLOATS = ir.VectorType(F16, LANES), ir.VectorType(F32, LANES)


class Weights(NamedTuple):
    """An `IntegerMatrix`: `blocks` in a row, and as many `loads` of codes for a panel's block. The compiler must not
    know how many: where it unrolls that loop it keeps more in registers than there are."""

    codes: Any
    scales: Any
    minimums: Any
    blocks: int
    loads: int


class Inputs(NamedTuple):
    """Quantized inputs; for each block a scale, and scale times the sum of its codes."""

    codes: Any
    scales: Any
    sums: Any


class Outputs(NamedTuple):
    """Float32 [rows, width], flat."""

    values: Any
    width: int


# -- products -----------------------------------------------------------------------------------------


def _byte_products(builder, total, weights, inputs):
    """total + bytes of 0 .. 127 times signed ones, added two by two as words."""
    if HAS_AVX2:
        return builder.add(total, call(builder, "llvm.x86.avx2.pmadd.ub.sw", WORDS, [weights, inputs]))
    wide = ir.VectorType(I16, 32)
    product = builder.mul(builder.zext(weights, wide), builder.sext(inputs, wide))
    return builder.add(total, pairwise(builder, product, builder.add))


def _sums_of_pairs(builder, a, b):
    """Words of `a` times words of `b`, added two by two as integers."""
    if HAS_AVX2:
        return call(builder, "llvm.x86.avx2.pmadd.wd", INTS, [a, b])
    wide = ir.VectorType(I32, 16)
    return pairwise(builder, builder.mul(builder.sext(a, wide), builder.sext(b, wide)), builder.add)


def _word_products(builder, total, weights, inputs):
    return builder.add(total, _sums_of_pairs(builder, weights, inputs))


def _sums_of_words(builder, words):
    return _sums_of_pairs(builder, words, constant(WORDS, 1))


# -- formats ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Format:
    """How a panel's block of weights meets a block of inputs.

    One load of codes, of kind `load`, is split into vectors. Each of them meets four bytes of inputs, repeated; they
    begin `inputs` elements after the first, which is `step` further on with each load."""

    block_bytes: int  # of codes
    load: ir.VectorType
    split: Callable[[Any, Any], list[Any]]
    inputs: tuple[int, ...]
    step: int
    total: ir.VectorType
    add: Callable[[Any, Any, Any, Any], Any]
    integers: Callable[[Any, Any], Any]  # of a total
    has_minimums: bool

    @property
    def load_bytes(self) -> int:
        return self.load.count * self.load.element.width // 8

    @property
    def input(self) -> ir.VectorType:
        return BYTES if self.total == WORDS else WORDS


def _byte_nibbles(builder, raw):
    return [builder.and_(raw, constant(BYTES, 15)), builder.lshr(raw, constant(BYTES, 4))]


def _word_nibbles(builder, raw):
    moved = [raw, *(builder.lshr(raw, constant(WORDS, bits)) for bits in (4, 8, 12))]
    return [builder.and_(words, constant(WORDS, 15)) for words in moved]


def _widened(builder, raw):
    return [builder.sext(raw, WORDS)]


def _same(builder, total):
    return total


NIBBLES_BYTES = _Format(128, BYTES, _byte_nibbles, (0, 16), 4, WORDS, _byte_products, _sums_of_words, True)
NIBBLES_WORDS = _Format(128, WORDS, _word_nibbles, (0, 2, 4, 6), 8, INTS, _word_products, _same, True)
BYTES_WORDS = _Format(256, ir.VectorType(I8, 16), _widened, (0,), 2, INTS, _word_products, _same, False)


def _format(weights, inputs) -> _Format:
    if weights.types[0].dtype == types.int8:
        return BYTES_WORDS
    return NIBBLES_BYTES if inputs.types[0].dtype == types.int8 else NIBBLES_WORDS


# -- kernels ------------------------------------------------------------------------------------------


class _Emitter:
    """Emits one kernel: `panels` panels from `panel` on meet `rows` rows of inputs from `row` on."""

    def __init__(self, context, builder, signature, values, panels: int, rows: int):
        self.context, self.builder = context, builder
        self.kinds, self.values = signature.args, values
        self.panels, self.rows = panels, rows
        self.format = _format(*signature.args[:2])
        self.pairs = [(panel, row) for panel in range(panels) for row in range(rows)]
        self.blocks, self.loads = self.field(0, 3), self.field(0, 4)
        self.panel, self.row = values[3], values[4]

    def field(self, argument: int, index: int):
        """A number in a record."""
        value = self.builder.extract_value(self.values[argument], index)
        return self.context.cast(self.builder, value, self.kinds[argument].types[index], types.intp)

    def at(self, argument: int, index: int, at, kind):
        """A pointer into an array in a record."""
        array = self.builder.extract_value(self.values[argument], index)
        return pointer(self.context, self.builder, self.kinds[argument].types[index], array, at, kind)

    def linear(self, *terms):
        """The sum of terms; a tuple is a product."""
        total = ir.Constant(I64, 0)
        for term in terms:
            product = ir.Constant(I64, 1)
            for factor in term if isinstance(term, tuple) else (term,):
                number = ir.Constant(I64, factor) if isinstance(factor, int) else factor
                product = self.builder.mul(product, number)
            total = self.builder.add(total, product)
        return total

    def emit(self) -> None:
        builder = self.builder
        results, totals = (
            [cgutils.alloca_once(builder, kind) for _ in self.pairs] for kind in (FLOATS, self.format.total)
        )
        for result in results:
            builder.store(constant(FLOATS, 0.0), result)
        with cgutils.for_range(builder, self.blocks) as block:
            for total in totals:
                builder.store(constant(self.format.total, 0), total)
            with cgutils.for_range(builder, self.loads) as load:
                self.multiply(block.index, load.index, totals)
            self.finish(block.index, totals, results)
        for (panel, row), result in zip(self.pairs, results, strict=True):
            self.add_to_output(panel, row, builder.load(result))

    def multiply(self, block, load, totals) -> None:
        """One load of codes of each panel meets its inputs in each row."""
        builder, form = self.builder, self.format
        inputs: dict[tuple[int, int], Any] = {}
        first = (self.row, self.blocks, BLOCK), (block, self.rows * BLOCK), (load, form.step)
        for panel in range(self.panels):
            before = (self.panel, self.blocks, form.block_bytes), (panel, self.blocks, form.block_bytes)
            at = self.linear(*before, (block, form.block_bytes), (load, form.load_bytes))
            parts = form.split(builder, builder.load(self.at(0, 0, at, form.load), align=1))
            for part, offset in zip(parts, form.inputs, strict=True):
                for row in range(self.rows):
                    if (row, offset) not in inputs:
                        four = builder.load(self.at(1, 0, self.linear(*first, row * BLOCK + offset), I32), align=1)
                        inputs[row, offset] = builder.bitcast(splat(builder, four, INTS), form.input)
                    total = totals[panel * self.rows + row]
                    builder.store(form.add(builder, builder.load(total), part, inputs[row, offset]), total)

    def finish(self, block, totals, results) -> None:
        """result += total x both scales, and the block's minimum x the sum of its inputs."""
        builder = self.builder
        for (panel, row), total, result in zip(self.pairs, totals, results, strict=True):
            weight_at = self.linear((self.panel, self.blocks, LANES), (panel, self.blocks, LANES), (block, LANES))
            input_at = self.linear((self.row, self.blocks), (block, self.rows), row)

            def of_weights(index, at=weight_at):
                return builder.fpext(builder.load(self.at(0, index, at, HALVES), align=2), FLOATS)

            def of_inputs(index, at=input_at):
                return splat(builder, builder.load(self.at(1, index, at, F32)), FLOATS)

            value = builder.load(result)
            if self.format.has_minimums:
                value = math(builder, "fma", [of_weights(2), of_inputs(2), value])
            number = builder.sitofp(self.format.integers(builder, builder.load(total)), FLOATS)
            scale = builder.fmul(of_weights(1), of_inputs(1))
            builder.store(math(builder, "fma", [number, scale, value]), result)

    def add_to_output(self, panel: int, row: int, result) -> None:
        """The last panels may have fewer rows than lanes."""
        builder, width = self.builder, self.field(2, 1)
        column = self.linear((self.panel, LANES), panel * LANES)
        at = self.linear((self.row, width), (row, width), column)
        left = builder.sub(width, column)
        with builder.if_else(builder.icmp_signed(">=", left, ir.Constant(I64, LANES))) as (whole, part):
            with whole:
                place = self.at(2, 0, at, FLOATS)
                builder.store(builder.fadd(builder.load(place, align=4), result), place, align=4)
            with part, cgutils.for_range(builder, left) as lane:
                place = self.at(2, 0, builder.add(at, lane.index), F32)
                builder.store(builder.fadd(builder.load(place), builder.extract_element(result, lane.index)), place)


def _kernel(panels: int, rows: int) -> Any:
    def define(typingctx, weights, inputs, outputs, panel, row):
        def codegen(context, builder, signature, values):
            _Emitter(context, builder, signature, values, panels, rows).emit()
            return context.get_dummy_value()

        return types.void(weights, inputs, outputs, types.intp, types.intp), codegen

    return intrinsic(define)


# (weights, inputs, outputs, panel, row)
four_rows = _kernel(panels=1, rows=ROWS)
one_row = _kernel(panels=PANELS, rows=1)
