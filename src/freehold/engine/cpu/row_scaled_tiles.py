"""The inner loops of `row_scaled`: one row of inputs, or four, times a panel of weights, in vectors.

The sum of a block is an integer of 32 bits, for each of the two digits of inputs. It is added to the sum of the row
with the block's own scale, an integer as well, in float64: all of these numbers are below 2**53, so nothing is rounded.

With one row, products wait for memory. Panels are read one after the other: two at a time, whose lines alternate, are
read at half the speed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from freehold.engine.cpu.code_forms import NIBBLE_LOADS
from freehold.engine.cpu.codes import BLOCK
from freehold.engine.cpu.integer_tiles import ROWS, Records, kernel, write_output
from freehold.engine.cpu.integer_vectors import IntegerVectors
from freehold.engine.cpu.vectors import F32, F64, I16, I32, I64, constant, joined, math, slice_of, splat

DIGITS = 2  # of inputs: bytes, both signed; the lower one first
_LOW, _HIGH = 0, 16  # the columns of a block that the halves of a byte belong to


class Weights(NamedTuple):
    """A `RowScaledMatrix`: `blocks` in a row. `loads` is NIBBLE_LOADS, which the compiler must not know: where it
    unrolls that loop it keeps more in registers than there are."""

    codes: Any
    scales: Any
    minimums: Any
    units: Any
    blocks: int
    loads: int
    isa: Any


class Inputs(NamedTuple):
    """Codes as digits, int8; a float32 for each row that a code's 1 stands for; the sum of codes for each block, an
    integer in a float64."""

    codes: Any
    units: Any
    sums: Any


def write_products(records: Records, panel, row, sums) -> None:
    """`sums` are float64, the first half of the lanes and the second. They are rounded, and written as `write_sums`
    does it."""
    builder, half = records.builder, sums[0].type.count
    rounded = [builder.fptrunc(one, ir.VectorType(F32, half)) for one in sums]
    write_sums(records, panel, row, joined(builder, *rounded))


def write_sums(records: Records, panel, row, sums, write: Callable[..., None] = write_output) -> None:
    """outputs[row, the columns of a panel] = what they are added to + sums, floats of all lanes, times both units. The
    kernel's arguments are weights, inputs, outputs, ..."""
    builder, floats = records.builder, sums.type
    unit = splat(builder, builder.load(records.at(1, 1, row, F32)), floats)
    of_weights = builder.load(records.at(0, 3, records.linear((panel, floats.count)), floats), align=4)
    write(records, panel, row, builder.fmul(sums, builder.fmul(unit, of_weights)))


class _Emitter(Records):
    """Emits one kernel: a panel meets `rows` rows of inputs from `row` on."""

    def __init__(self, context, builder, signature, values, rows: int):
        super().__init__(context, builder, signature, values)
        self.vectors = IntegerVectors(signature.args[0].types[6].instance_class)
        self.lanes, self.rows = self.vectors.lanes, rows
        self.sums = ir.VectorType(F64, self.lanes // 2)  # a register: never wider than those of integers
        self.blocks, self.loads = self.field(0, 4), self.field(0, 5)
        self.panel, self.row = values[3], values[4]
        self.stride = row_bytes(builder, self.blocks)

    def emit(self) -> None:
        builder, rows = self.builder, range(self.rows)
        sums = [[self.cleared(self.sums) for _ in range(2)] for _ in rows]
        with cgutils.for_range(builder, self.blocks) as block:
            totals = [[self.cleared(self.vectors.byte_total) for _ in range(DIGITS)] for _ in rows]
            number = self.linear((self.panel, self.blocks), block.index)
            with cgutils.for_range(builder, self.loads) as load:
                self.multiply(number, block.index, load.index, totals)
            self.finish(number, block.index, totals, sums)
        for row, halves in zip(rows, sums, strict=True):
            found = [builder.load(half) for half in halves]
            write_products(self, self.panel, self.linear(self.row, row), found)

    def cleared(self, kind):
        place = cgutils.alloca_once(self.builder, kind)
        self.builder.store(constant(kind, 0), place)
        return place

    def multiply(self, number, block, load, totals) -> None:
        """One load of codes of the panel's block, which is `number` of the matrix, meets both digits of each row."""
        builder, of_bytes = self.builder, self.vectors.bytes
        at = self.linear((number, NIBBLE_LOADS * of_bytes.count), (load, of_bytes.count))
        raw = builder.load(self.at(0, 0, at, of_bytes), align=1)
        self.prefetch(0, at, NIBBLE_LOADS * of_bytes.count)
        halves = {
            _LOW: builder.and_(raw, constant(of_bytes, 15)),
            _HIGH: builder.lshr(raw, constant(of_bytes, 4)),
        }
        first = (self.row, self.stride), (block, self.rows * BLOCK * DIGITS), (load, 4)
        for offset, weights in halves.items():
            for digit in range(DIGITS):
                for row, of_row in enumerate(totals):
                    place = self.linear(*first, (digit * self.rows + row) * BLOCK + offset)
                    four = builder.load(self.at(1, 0, place, I32), align=1)
                    inputs = builder.bitcast(splat(builder, four, self.vectors.ints), of_bytes)
                    added = self.vectors.add_bytes(builder, builder.load(of_row[digit]), weights, inputs)
                    builder.store(added, of_row[digit])

    def prefetch(self, index: int, at, block_size: int) -> None:
        """Bring the numbers that the panels have at the same place which come next. The array has `block_size` of them
        for each block of a panel."""
        self.bring(0, index, self.linear(at, (self.blocks, block_size)))

    def finish(self, number, block, totals, sums) -> None:
        """sum += total x scale + the sum of inputs x minimum."""
        builder = self.builder

        def of_weights(index):
            kind, at = ir.VectorType(I16, self.lanes), self.linear((number, self.lanes))
            found = builder.load(self.at(0, index, at, kind), align=2)
            self.prefetch(index, at, self.lanes)
            return doubles(builder, builder.sext(found, self.vectors.ints))

        scales, minimums = of_weights(1), of_weights(2)
        for row in range(self.rows):
            low, high = (self.vectors.integers(builder, builder.load(total)) for total in totals[row])
            total = doubles(builder, builder.add(builder.shl(high, constant(high.type, 8)), low))
            input_at = self.linear((self.row, self.blocks), (block, self.rows), row)
            of_inputs = splat(builder, builder.load(self.at(1, 2, input_at, F64)), self.sums)
            for part, scale, minimum, place in zip(total, scales, minimums, sums[row], strict=True):
                value = math(builder, "fma", [minimum, of_inputs, builder.load(place)])
                builder.store(math(builder, "fma", [scale, part, value]), place)


def doubles(builder, integers) -> list[Any]:
    """The first half of the lanes and the second."""
    half = integers.type.count // 2
    kind = ir.VectorType(F64, half)
    return [builder.sitofp(slice_of(builder, integers, half, number), kind) for number in range(2)]


def row_bytes(builder, blocks):
    """Of a row of inputs: blocks are stored in pairs."""
    one = ir.Constant(I64, 1)
    pairs = builder.lshr(builder.add(blocks, one), one)
    return builder.mul(pairs, ir.Constant(I64, 2 * BLOCK * DIGITS))


four_rows, one_row = (kernel(_Emitter, rows) for rows in (ROWS, 1))
