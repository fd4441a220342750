"""Integer kernels for Arm, of which no machine need be here: their assembly, and their results where an emulator is."""

import numpy as np
import pytest

import cross_compiled
from freehold.engine.cpu.integer_linear import (
    NIBBLE_LOADS,
    NO_NORM,
    PLAIN,
    IntegerMatrix,
    Preparation,
    _quantize_row,
)
from freehold.engine.cpu.integer_tiles import BLOCK, ROWS, Inputs
from freehold.engine.cpu.isa import Neon, Portable
from freehold.engine.cpu.quantize import IN_ORDER, IN_ROW
from freehold.models.tensor import TensorFormat
from random_tensors import stored

COLUMNS = 192
CASES = [("Q4_1", "int8"), ("Q4_1", "int16"), ("Q8_0", "int16"), ("Q6_K", "int16")]


def operands(kind: str, inputs: str, rows: int):
    """A matrix of 24 rows packed for Arm, a few rows of inputs as its kernels read them, and the product as computed
    here."""
    rng = np.random.default_rng(rows)
    columns = 256 if kind.endswith("K") else COLUMNS
    tensor = stored(rng.standard_normal((24, columns)).astype(np.float32), TensorFormat(kind))
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    here, there = (IntegerMatrix.pack([tensor], inputs, isa) for isa in (Portable(), Neon()))
    expected = np.zeros((rows, 24), np.float32)
    here.multiply_add(x, expected)
    blocks = columns // BLOCK
    codes = Inputs(np.zeros(x.size, there.inputs), *(np.zeros(rows * blocks, np.float32) for _ in range(2)))
    how = IN_ORDER if there.inputs is np.int16 and there._loads == NIBBLE_LOADS else IN_ROW
    for row in range(rows):
        _quantize_row(Preparation(PLAIN, NO_NORM, np.float32(0)), x.ravel(), row, rows, 0, blocks, how, codes)
    return cross_compiled.records(there, codes, rows), expected


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize(("kind", "inputs"), CASES)
def test_products_are_a_few_instructions(kind, inputs, rows):
    (weights, codes, outputs), _ = operands(kind, inputs, rows)
    assembly, _ = cross_compiled.compiled(cross_compiled.kernel(weights, codes, outputs, rows))
    words = assembly.split()
    if inputs == "int8":
        assert words.count("sdot") >= 4
    else:
        assert words.count("smull") + words.count("smlal") >= 2
        assert words.count("addp") >= 2
    assert "fmla" in words
    assert "bl" not in words, "nothing is called"


@pytest.mark.skipif(not cross_compiled.can_run(), reason="no gcc and no emulator for Arm")
@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize(("kind", "inputs"), CASES)
def test_an_emulated_processor_gives_the_same_bits(kind, inputs, rows, tmp_path):
    (weights, codes, outputs), expected = operands(kind, inputs, rows)
    _, program = cross_compiled.compiled(cross_compiled.kernel(weights, codes, outputs, rows))
    found = cross_compiled.run(program, weights, codes, outputs, rows, tmp_path)
    np.testing.assert_array_equal(found, expected)
