"""Integer kernels for Arm, of which no machine need be here: their assembly, and their results where an emulator is."""

import numpy as np
import pytest

import cross_compiled
from freehold.engine.cpu import integer_linear, integer_tiles, row_scaled, row_scaled_tiles
from freehold.engine.cpu.few_bits import FEW_BITS
from freehold.engine.cpu.integer_linear import IntegerMatrix
from freehold.engine.cpu.integer_tiles import BLOCK, ROWS, Outputs
from freehold.engine.cpu.isa import Neon, Portable
from freehold.engine.cpu.pointwise import NO_NORM, PLAIN, Preparation
from freehold.engine.cpu.program import Now
from freehold.engine.cpu.row_scaled import RowScaledMatrix
from freehold.models.tensor import TensorFormat
from random_tensors import stored

COLUMNS = 192
PREPARATION = Preparation(PLAIN, NO_NORM, np.float32(0))
CASES = [("Q4_1", "int8"), ("Q4_1", "int16"), ("Q8_0", "int16"), ("Q5_0", "int16"), ("Q6_K", "int16")]


def operands(kind: str, inputs: str, rows: int):
    """A matrix of 24 rows packed for Arm, a few rows of inputs as its kernels read them, and the product as computed
    here."""
    rng = np.random.default_rng(rows)
    columns = 256 if kind.endswith("K") else COLUMNS
    tensor = stored(rng.standard_normal((24, columns)).astype(np.float32), TensorFormat(kind))
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    is_row_scaled = kind in FEW_BITS and (kind, inputs) != ("Q4_1", "int8")
    pack = RowScaledMatrix.pack if is_row_scaled else IntegerMatrix.pack
    here, there = (pack([tensor], isa) for isa in (Portable(), Neon()))
    expected, blocks = np.zeros((rows, 24), np.float32), columns // BLOCK
    here.multiply(Now(), x, expected)
    packed = there.codes, there.scales, there.minimums
    if isinstance(there, RowScaledMatrix):
        tiles, module = row_scaled_tiles, row_scaled
        weights = tiles.Weights(*packed, there.units, blocks, there.loads, there.offset, there.form, there.isa)
        sums = np.zeros(rows * blocks * there.form.parts * tiles.DIGITS, np.int32)
        codes = tiles.Inputs(np.zeros(2 * x.size, np.int8), np.zeros(rows, np.float32), sums)
    else:
        tiles, module = integer_tiles, integer_linear
        weights = tiles.Weights(*packed, blocks, there._loads, there.isa)
        codes = tiles.Inputs(np.zeros(x.size, there.inputs), *(np.zeros(rows * blocks, np.float32) for _ in range(2)))
    room = np.empty(columns, np.float32)
    values = np.zeros(rows * 24, np.float32)
    for row in range(rows):
        sizes = (blocks, there.form.parts) if is_row_scaled else (blocks,)
        module._quantize_row(PREPARATION, x.ravel(), row, rows, 0, *sizes, codes, room)
    return (weights, codes, Outputs(values, 24, 0, 24, 1)), expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize(("kind", "inputs"), CASES)
def test_products_are_a_few_instructions(kind, inputs, rows):
    (weights, codes, outputs), _ = operands(kind, inputs, rows)
    assembly, _ = cross_compiled.compiled(cross_compiled.kernel(weights, codes, outputs, rows))
    words = assembly.split()
    if kind != "Q8_0":
        assert words.count("sdot") >= 4
    else:
        assert words.count("smull") + words.count("smlal") >= 2
        assert words.count("addp") >= 2
    assert "fmla" in words
    assert "bl" not in words, "nothing is called"


@pytest.mark.sampled(3)
@pytest.mark.skipif(not cross_compiled.can_run(), reason="no gcc and no emulator for Arm")
@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize(("kind", "inputs"), CASES)
def test_an_emulated_processor_gives_the_same_bits(kind, inputs, rows, tmp_path):
    (weights, codes, outputs), expected = operands(kind, inputs, rows)
    _, program = cross_compiled.compiled(cross_compiled.kernel(weights, codes, outputs, rows))
    found = cross_compiled.run(program, weights, codes, outputs, rows, tmp_path)
    np.testing.assert_array_equal(found, expected)
