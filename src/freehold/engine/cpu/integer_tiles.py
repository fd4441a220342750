"""The inner loops of `integer_linear`: one or four rows of inputs times some panels of weights.

Each pair of a panel and a row has a sum. Inside a block of 32 columns sums are exact integers. Formats differ in how a
load of codes becomes vectors (`_Format`), and instruction sets in lanes per vector and in products (`IntegerVectors`).
The rest is one description, from which each kernel is generated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import register_jitable

from freehold.engine.cpu.isa import WITH_VNNI, Avx2, Isa, Neon
from freehold.engine.cpu.vectors import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    NEAREST,
    call,
    constant,
    intrinsic,
    joined,
    math,
    pairwise,
    pointer,
    prefetch,
    slice_of,
    splat,
)

BLOCK = 32  # columns that share a scale
GROUP = 32  # rows of weights per task: 4 panels of 8, or 2 of 16
ROWS = 4  # of inputs, with interleaved blocks
NIBBLE_LOADS, BYTE_LOADS = 4, 16  # loads of codes per panel block


class Weights(NamedTuple):
    """An `IntegerMatrix` with `blocks` per row and `loads` of codes per panel block. The compiler must not know these
    counts: it would unroll the loop and run out of registers. A panel has as many rows as the instruction set has
    lanes."""

    codes: Any
    scales: Any
    minimums: Any
    blocks: int
    loads: int
    isa: Isa


class Inputs(NamedTuple):
    """Quantized inputs; for each block a scale, and scale times the sum of its codes."""

    codes: Any
    scales: Any
    sums: Any


class Outputs(NamedTuple):
    """Outputs float32 [rows, width], flat, and what products are added to: the number at address `onto`, plus
    `row_step` numbers per row and `column_step` per column. If `column_step` is 0, there are 16 equal ones."""

    values: Any
    width: int
    onto: int
    row_step: int
    column_step: int


# -- products -----------------------------------------------------------------------------------------


def has_wide_totals(isa: type) -> bool:
    """Return whether products of bytes are summed as 32-bit integers."""
    return isa in (*WITH_VNNI, Neon)


class IntegerVectors:
    """An instruction set's registers, and integer products in them."""

    def __init__(self, isa: type):
        self.isa, lanes = isa, isa().lanes
        self.lanes = lanes
        self.bytes, self.words = ir.VectorType(I8, 4 * lanes), ir.VectorType(I16, 2 * lanes)
        self.ints, self.floats, self.halves = (ir.VectorType(kind, lanes) for kind in (I32, F32, F16))

    @property
    def byte_total(self) -> ir.VectorType:
        """The type for sums of byte products: words without an instruction for more."""
        return self.ints if has_wide_totals(self.isa) else self.words

    def add_bytes(self, builder, total, weights, inputs):
        """Return total + non-negative bytes times signed ones, summed in twos or fours."""
        if self.isa in WITH_VNNI:
            return self._vnni(builder, "vpdpbusd", total, weights, inputs)
        if self.isa is Avx2:
            return builder.add(total, call(builder, "llvm.x86.avx2.pmadd.ub.sw", self.words, [weights, inputs]))
        if self.isa is Neon:
            return self._dot(builder, total, weights, inputs)
        wide = ir.VectorType(I16, self.bytes.count)
        product = builder.mul(builder.zext(weights, wide), builder.sext(inputs, wide))
        return builder.add(total, pairwise(builder, product, builder.add))

    def integers(self, builder, total):
        """Return a block's total as integers."""
        return total if total.type == self.ints else self._sums_of_pairs(builder, total, constant(self.words, 1))

    def scaled(self, builder, total, scale):
        """Return a block's total times `scale`, a 16-bit integer per lane, modulo 2**32."""
        if total.type == self.ints:
            return builder.mul(total, scale)
        lower = builder.and_(scale, constant(self.ints, 0xFFFF))
        both = builder.or_(lower, builder.shl(scale, constant(self.ints, 16)))
        return self._sums_of_pairs(builder, total, builder.bitcast(both, self.words))

    def add_lower_words(self, builder, total, weights, inputs):
        """Return total + weights x inputs, each a 16-bit integer per lane."""
        lower = builder.and_(weights, constant(self.ints, 0xFFFF))  # the upper words meet zeros
        return self.add_words(builder, total, *(builder.bitcast(one, self.words) for one in (lower, inputs)))

    def add_words(self, builder, total, weights, inputs):
        """Return total + words of `weights` times words of `inputs`, summed in pairs."""
        if self.isa in WITH_VNNI:
            return self._vnni(builder, "vpdpwssd", total, weights, inputs)
        return builder.add(total, self._sums_of_pairs(builder, weights, inputs))

    def _vnni(self, builder, name, total, weights, inputs):
        a, b = (builder.bitcast(one, self.ints) for one in (weights, inputs))
        return call(builder, f"llvm.x86.avx512.{name}.{32 * self.lanes}", self.ints, [total, a, b])

    def _dot(self, builder, total, weights, inputs):
        """Multiply as signed: weights have at most seven bits, so none looks negative."""
        halves = [
            [slice_of(builder, one, one.type.count // 2, half) for one in (total, weights, inputs)] for half in range(2)
        ]
        name, kind = "llvm.aarch64.neon.sdot.v4i32.v16i8", ir.VectorType(I32, 4)
        return joined(builder, *(call(builder, name, kind, arguments) for arguments in halves))

    def _sums_of_pairs(self, builder, a, b):
        if self.isa is Avx2:
            return call(builder, "llvm.x86.avx2.pmadd.wd", self.ints, [a, b])
        if self.isa is Neon:
            fours = [self._products_of_words(builder, a, b, number) for number in range(a.type.count // 4)]
            name = "llvm.aarch64.neon.addp.v4i32"
            return joined(builder, *(call(builder, name, fours[0].type, fours[i : i + 2]) for i in (0, 2)))
        wide = ir.VectorType(I32, self.words.count)
        return pairwise(builder, builder.mul(builder.sext(a, wide), builder.sext(b, wide)), builder.add)

    def _products_of_words(self, builder, a, b, number):
        """Multiply four words, from `4 * number` on, in one instruction."""
        wide = ir.VectorType(I32, 4)
        return builder.mul(*(builder.sext(slice_of(builder, one, 4, number), wide) for one in (a, b)))


# -- formats ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Format:
    """How a panel's block of weights is multiplied with a block of inputs.

    One load of codes, of type `load`, is split into vectors. Each is multiplied by four bytes of inputs, repeated,
    which begin `inputs` elements after the first. Each load advances the first by `step`.
    """

    block_bytes: int  # of codes
    load: ir.VectorType
    split: Callable[[Any, Any], list[Any]]
    inputs: tuple[int, ...]
    step: int
    input: ir.VectorType
    total: ir.VectorType
    add: Callable[[Any, Any, Any, Any], Any]
    has_minimums: bool
    parts: int = 1  # of a block that have a scale each

    @property
    def load_bytes(self) -> int:
        return self.load.count * self.load.element.width // 8


def _byte_nibbles(builder, raw):
    return [builder.and_(raw, constant(raw.type, 15)), builder.lshr(raw, constant(raw.type, 4))]


def _widened(builder, raw):
    return [builder.sext(raw, ir.VectorType(I16, raw.type.count))]


def _format(weights, vectors: IntegerVectors) -> _Format:
    lanes, of_bytes = vectors.lanes, vectors.bytes
    if weights.types[0].dtype == types.uint8:
        total, offsets = vectors.byte_total, (0, 16)
        return _Format(16 * lanes, of_bytes, _byte_nibbles, offsets, 4, of_bytes, total, vectors.add_bytes, True)
    load, is_fine = ir.VectorType(I8, 2 * lanes), weights.types[1].dtype == types.float32
    of_words, add = (vectors.words, vectors.ints), vectors.add_words
    return _Format(32 * lanes, load, _widened, (0,), 2, *of_words, add, is_fine, 2 if is_fine else 1)


# -- kernels ------------------------------------------------------------------------------------------


class Records:
    """The arguments of an intrinsic that takes records of arrays and numbers."""

    def __init__(self, context, builder, signature, values):
        self.context, self.builder = context, builder
        self.kinds, self.values = signature.args, values

    def field(self, argument: int, index: int):
        """Return a number in a record."""
        value = self.builder.extract_value(self.values[argument], index)
        return self.context.cast(self.builder, value, self.kinds[argument].types[index], types.intp)

    def at(self, argument: int, index: int, at, kind):
        """Return a pointer into an array in a record."""
        array = self.builder.extract_value(self.values[argument], index)
        return pointer(self.context, self.builder, self.kinds[argument].types[index], array, at, kind)

    def bring(self, argument: int, index: int, at, cache: int = NEAREST) -> None:
        """Prefetch the line of an array element in a record."""
        prefetch(self.builder, self.at(argument, index, at, I8), cache)

    def linear(self, *terms):
        """Return the sum of terms; a tuple is a product."""
        total = ir.Constant(I64, 0)
        for term in terms:
            product = ir.Constant(I64, 1)
            for factor in term if isinstance(term, tuple) else (term,):
                number = ir.Constant(I64, factor) if isinstance(factor, int) else factor
                product = self.builder.mul(product, number)
            total = self.builder.add(total, product)
        return total

    def array(self, argument: int, at, kind):
        """Return a pointer into an array argument."""
        return pointer(self.context, self.builder, self.kinds[argument], self.values[argument], at, kind)


class _Emitter(Records):
    """Emits one kernel: panels from `panel` on times `rows` rows of inputs from `row` on."""

    def __init__(self, context, builder, signature, values, rows: int):
        super().__init__(context, builder, signature, values)
        self.vectors = IntegerVectors(signature.args[0].types[5].instance_class)
        self.panels, self.rows = panels_at_once(self.vectors.lanes, rows), rows
        self.format = _format(signature.args[0], self.vectors)
        self.pairs = [(panel, row) for panel in range(self.panels) for row in range(rows)]
        self.blocks, self.loads = self.field(0, 3), self.field(0, 4)
        self.panel, self.row = values[3], values[4]

    def emit(self) -> None:
        builder = self.builder
        floats, total_kind = self.vectors.floats, self.format.total
        results, totals = ([cgutils.alloca_once(builder, kind) for _ in self.pairs] for kind in (floats, total_kind))
        for result in results:
            builder.store(constant(floats, 0.0), result)
        with cgutils.for_range(builder, self.blocks) as block:
            for part in range(self.format.parts):
                for total in totals:
                    builder.store(constant(total_kind, 0), total)
                with cgutils.for_range(builder, self.loads) as load:
                    self.multiply(block.index, self.linear(load.index, (self.loads, part)), totals)
                self.finish(block.index, part, totals, results)
        for (panel, row), result in zip(self.pairs, results, strict=True):
            to = self.linear(self.panel, panel), self.linear(self.row, row)
            write_output(self, *to, builder.load(result))

    def multiply(self, block, load, totals) -> None:
        """Multiply one load of each panel's codes with each row's inputs."""
        builder, form = self.builder, self.format
        inputs: dict[tuple[int, int], Any] = {}
        first = (self.row, self.blocks, BLOCK), (block, self.rows * BLOCK), (load, form.step)
        for panel in range(self.panels):
            before = (self.panel, self.blocks, form.block_bytes), (panel, self.blocks, form.block_bytes)
            at = self.linear(*before, (block, form.block_bytes), (load, form.load_bytes))
            parts = form.split(builder, builder.load(self.at(0, 0, at, form.load), align=1))
            self.prefetch(0, at, form.block_bytes)
            for part, offset in zip(parts, form.inputs, strict=True):
                for row in range(self.rows):
                    if (row, offset) not in inputs:
                        four = builder.load(self.at(1, 0, self.linear(*first, row * BLOCK + offset), I32), align=1)
                        inputs[row, offset] = builder.bitcast(splat(builder, four, self.vectors.ints), form.input)
                    total = totals[panel * self.rows + row]
                    builder.store(form.add(builder, builder.load(total), part, inputs[row, offset]), total)

    def prefetch(self, index: int, at, block_size: int) -> None:
        """Prefetch the same numbers of the next panels. The array has `block_size` of them per panel block."""
        self.bring(0, index, self.linear(at, (self.blocks, self.panels * block_size)))

    def finish(self, block, part: int, totals, results) -> None:
        """Add total x both scales to the result, and, once a block, its minimum x the sum of its inputs."""
        builder, vectors, lanes = self.builder, self.vectors, self.vectors.lanes
        for (panel, row), total, result in zip(self.pairs, totals, results, strict=True):
            number = self.linear((self.panel, self.blocks), (panel, self.blocks), block)
            input_at = self.linear((self.row, self.blocks), (block, self.rows), row)

            def of_weights(index, at):
                self.prefetch(index, at, lanes * (self.format.parts if index == 1 else 1))
                if self.kinds[0].types[index].dtype == types.float32:
                    return builder.load(self.at(0, index, at, vectors.floats), align=4)
                return builder.fpext(builder.load(self.at(0, index, at, vectors.halves), align=2), vectors.floats)

            def of_inputs(index, at=input_at):
                return splat(builder, builder.load(self.at(1, index, at, F32)), vectors.floats)

            value = builder.load(result)
            if self.format.has_minimums and part == 0:
                value = math(builder, "fma", [of_weights(2, self.linear((number, lanes))), of_inputs(2), value])
            scale_at = self.linear((number, self.format.parts * lanes), part * lanes)
            integers = builder.sitofp(vectors.integers(builder, builder.load(total)), vectors.floats)
            scale = builder.fmul(of_weights(1, scale_at), of_inputs(1))
            builder.store(math(builder, "fma", [integers, scale, value]), result)


class _Output(NamedTuple):
    """Where a row's outputs of a panel go, an index in `out`; where their addends begin, `step` apart; and how many
    columns are left."""

    at: Any
    onto: Any
    step: Any
    left: Any


def _output(records: Records, panel, row, lanes: int) -> _Output:
    """Return the output place. Outputs are the kernel's third argument."""
    builder = records.builder
    width, onto, row_step, column_step = (records.field(2, index) for index in range(1, 5))
    column = records.linear((panel, lanes))
    begin = builder.gep(
        builder.inttoptr(onto, F32.as_pointer()), [records.linear((row, row_step), (column, column_step))]
    )
    return _Output(records.linear((row, width), column), begin, column_step, builder.sub(width, column))


def write_whole_output(records: Records, panel, row, result) -> None:
    """Write outputs[row, the panel's columns] = onto + result, a float per lane."""
    builder, to = records.builder, _output(records, panel, row, result.type.count)
    before = builder.load(builder.bitcast(to.onto, result.type.as_pointer()), align=4)
    builder.store(builder.fadd(before, result), records.at(2, 0, to.at, result.type), align=4)


def write_output(records: Records, panel, row, result) -> None:
    """Write likewise, where the last panels may have fewer columns than lanes."""
    builder, lanes = records.builder, result.type.count
    to = _output(records, panel, row, lanes)
    with builder.if_else(builder.icmp_signed(">=", to.left, ir.Constant(I64, lanes))) as (whole, part):
        with whole:
            write_whole_output(records, panel, row, result)
        with part, cgutils.for_range(builder, to.left) as lane:
            before = builder.load(builder.gep(to.onto, [builder.mul(lane.index, to.step)]))
            place = records.at(2, 0, builder.add(to.at, lane.index), F32)
            builder.store(builder.fadd(before, builder.extract_element(result, lane.index)), place)


@register_jitable
def panels_at_once(lanes: int, rows: int) -> int:
    """Return how many panels a kernel takes at once: one for one row, which is memory-bound and then reads in order;
    else as many as registers hold sums for."""
    return 1 if rows == 1 or lanes == 8 else GROUP // lanes


def kernel(emitter: type, rows: int) -> Any:
    """Return a kernel (weights, inputs, outputs, panel, row) from `emitter` for this many rows of inputs."""

    def define(typingctx, weights, inputs, outputs, panel, row):
        def codegen(context, builder, signature, values):
            emitter(context, builder, signature, values, rows).emit()
            return context.get_dummy_value()

        return types.void(weights, inputs, outputs, types.intp, types.intp), codegen

    return intrinsic(define)


four_rows, one_row = (kernel(_Emitter, rows) for rows in (ROWS, 1))
