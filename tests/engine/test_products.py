"""Products of weights, and operations of rows, against plain torch and against themselves: a row's bits never depend on
its neighbours."""

import itertools

import numpy as np
import pytest
import torch

from freehold.config import CPU_ISAS
from freehold.engine.cpu.backend import CpuBackend
from freehold.engine.cpu.codes import CODED
from freehold.engine.cpu.few_bits import FEW_BITS
from freehold.engine.cpu.integer_linear import FOUR_BITS, IntegerMatrix, has_four_bits
from freehold.engine.cpu.isa import AUTO, ISAS, choose, integer_sets, of_integers
from freehold.engine.cpu.linear import pack
from freehold.engine.cpu.pointwise import CLAMPED, GEGLU, NORM, SWIGLU, Preparation
from freehold.engine.cpu.program import Now
from freehold.engine.cpu.row_operations import prepare
from freehold.engine.cpu.row_scaled import LARGEST, RowScaledMatrix, has_few_bits
from freehold.models.tensor import TensorFormat
from random_tensors import stored

FORMATS = list(TensorFormat)
BEST = ISAS[choose()]
INTEGER_SETS = integer_sets()
INTEGER_FORMATS = sorted(CODED)
COLUMNS = 256  # of super-blocks


def product(weight, x) -> np.ndarray:
    out = np.empty((len(x), weight.rows), np.float32)
    weight.multiply(Now(), x, out)
    return out


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [32, 40, 96])
def test_linear_equals_the_dequantized_product(kind, rows):
    rng = np.random.default_rng(rows)
    tensor = stored(rng.standard_normal((rows, COLUMNS)).astype(np.float32), kind)
    weight = pack([tensor])
    x = rng.standard_normal((19, COLUMNS)).astype(np.float32)
    expected = x.astype(np.float64) @ tensor.to_float32().astype(np.float64).T
    np.testing.assert_allclose(product(weight, x), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(weight.gather(Now(), np.array([0, 17, rows - 1], np.int32)),
                                  tensor.to_float32()[[0, 17, rows - 1]])  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_of_a_product_is_the_same_bits_in_any_batch(kind):
    rng = np.random.default_rng(1)
    weight = pack([stored(rng.standard_normal((64, COLUMNS)).astype(np.float32), kind)])
    x = rng.standard_normal((200, COLUMNS)).astype(np.float32)
    whole = product(weight, x)
    for size in (1, 2, 3, 4, 5, 6, 7, 16, 97):
        np.testing.assert_array_equal(product(weight, x[:size]), whole[:size])


def rounded(x: np.ndarray, limit: int, columns: int = 32) -> np.ndarray:
    """Inputs as integer products see them, with a scale for so many columns."""
    blocks = x.reshape(len(x), -1, columns)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    codes = np.rint(blocks * (np.float32(limit) / np.where(largest > 0, largest, np.float32(1))))
    return (codes.astype(np.float64) * largest.astype(np.float64) / limit).reshape(x.shape)


def assert_rounded_to_units(weight: RowScaledMatrix, found: np.ndarray, there: np.ndarray) -> None:
    """Half a unit for the code in the middle, and half a unit more for each code beside it."""
    error = (2 ** (weight.form.bits - 2) + 0.6) * weight.units[: len(found), None]
    assert np.all(np.abs(found - there) <= error)


def packed(tensors, inputs: str, isa) -> IntegerMatrix | RowScaledMatrix:
    """As a backend packs them that computes with these inputs."""
    of_rows = has_few_bits(tensors) and (inputs == "int16" or not has_four_bits(tensors))
    return RowScaledMatrix.pack(tensors, isa) if of_rows else IntegerMatrix.pack(tensors, isa)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("inputs", ["int8", "int16"])
@pytest.mark.parametrize("kind", INTEGER_FORMATS)
@pytest.mark.parametrize("rows", [8, 32, 40, 96])
@pytest.mark.parametrize("isa", INTEGER_SETS.values(), ids=INTEGER_SETS)
def test_integer_products_are_exact_but_for_the_rounding_of_inputs(kind, rows, inputs, isa):
    rng = np.random.default_rng(rows)
    tensor = stored(rng.standard_normal((rows, COLUMNS)).astype(np.float32), kind)
    weight = packed([tensor], inputs, isa)
    found, there = weight.gather(Now(), np.arange(rows, dtype=np.int32)), tensor.to_float32()
    if isinstance(weight, IntegerMatrix):
        np.testing.assert_array_equal(found, there)
    else:
        assert_rounded_to_units(weight, found, there)
        error = (2 ** (weight.form.bits - 2) + 0.6) / LARGEST * np.abs(there).max(axis=1)
        assert np.all(np.abs(found - there).max(axis=1) < 1.1 * error)
    scale = (LARGEST, COLUMNS)
    if isinstance(weight, IntegerMatrix):
        scale = (127 if kind in FOUR_BITS else 32767, 32)
    for count in (1, 3, 4, 9, 16, 26, 130):
        x = rng.standard_normal((count, COLUMNS)).astype(np.float32)
        x[-1, 32:64] = 0
        right = rounded(x, *scale) @ found.astype(np.float64).T
        np.testing.assert_allclose(product(weight, x), right, rtol=1e-4, atol=2e-4 + 5e-6 * np.abs(right).max())


@pytest.mark.parametrize(
    ("kind", "columns"),
    [(kind, columns) for kind in sorted(FEW_BITS) for columns in (256, 1280)] + [("Q4_1", 288), ("Q5_0", 288)],
)
@pytest.mark.parametrize("isa", INTEGER_SETS.values(), ids=INTEGER_SETS)
def test_products_of_whole_rows_are_sums_of_integers_rounded_once(kind, columns, isa):
    """Compared with sums of 64 bits. The largest and the smallest weights and inputs there can be are among them, and
    a row of zeros. 288 columns are an odd number of blocks."""
    rng = np.random.default_rng(columns)
    values = rng.standard_normal((50, columns)).astype(np.float32)
    values[3], values[4, ::2], values[4, 1::2], values[5, :-1] = 5, 5, -5, 0
    weight = RowScaledMatrix.pack([stored(values, TensorFormat(kind))], isa)
    integers = np.rint(weight.gather(Now(), np.arange(50, dtype=np.int32)) / weight.units[:50, None]).astype(np.int64)
    x = rng.standard_normal((37, columns)).astype(np.float32)
    x[1], x[2], x[3], x[4] = 0, 7, -7, values[4]
    x[5], x[5, 0] = (LARGEST - 255) / LARGEST, 1  # all but one have the lowest lower digit
    largest = np.abs(x).max(axis=1)
    factors = np.where(largest > 0, np.float32(LARGEST) / np.where(largest > 0, largest, 1), 0).astype(np.float32)
    codes = np.rint(x * factors[:, None]).astype(np.int64)
    sums = (codes @ integers.T).astype(np.float32)
    right = sums * ((largest / np.float32(LARGEST))[:, None] * weight.units[None, :50])
    for count in (1, 2, 4, 7, 12, 16, 29, 37):
        np.testing.assert_array_equal(product(weight, x[:count]), right[:count])


@pytest.mark.parametrize("inputs", ["int8", "int16"])
@pytest.mark.parametrize("kind", INTEGER_FORMATS)
def test_a_row_of_an_integer_product_is_the_same_bits_in_any_batch(kind, inputs):
    rng = np.random.default_rng(1)
    tensor = stored(rng.standard_normal((72, COLUMNS)).astype(np.float32), kind)
    weight = packed([tensor], inputs, of_integers(BEST))
    x = rng.standard_normal((50, COLUMNS)).astype(np.float32)
    whole = product(weight, x)
    for size in (1, 2, 3, 4, 5, 7, 16, 33):
        np.testing.assert_array_equal(product(weight, x[:size]), whole[:size])
        np.testing.assert_array_equal(product(weight, np.ascontiguousarray(x[-size:])), whole[-size:])


@pytest.mark.parametrize("inputs", ["int8", "int16"])
def test_sums_never_overflow(inputs):
    """The largest codes everywhere."""
    values = np.tile(np.linspace(-8, 7, 16, dtype=np.float32), (32, 4))
    values[:, 32:] = 7
    tensor = stored(values, TensorFormat.Q4_0)
    for isa in INTEGER_SETS.values():
        weight = packed([tensor], inputs, isa)
        for sign, count in itertools.product((1, -1), (4, 16, 128)):
            x = np.full((count, 64), sign, np.float32)
            np.testing.assert_allclose(product(weight, x), x @ tensor.to_float32().T, rtol=4e-4)


@pytest.mark.parametrize("inputs", ["int8", "int16"])
@pytest.mark.parametrize("kind", INTEGER_FORMATS)
def test_all_instruction_sets_give_the_same_bits(kind, inputs):
    """With rows that fill no panel, and rows of inputs that fill no tile."""
    rng = np.random.default_rng(3)
    for rows in (1, 17, 40, 96):
        tensor = stored(rng.standard_normal((rows, COLUMNS)).astype(np.float32), kind)
        x = rng.standard_normal((140, COLUMNS)).astype(np.float32)
        weights = [packed([tensor], inputs, isa) for isa in INTEGER_SETS.values()]
        for count in (1, 2, 4, 11, 16, 37, 140):
            first, *others = [product(weight, x[:count]) for weight in weights]
            for other in others:
                np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize(
    "kinds",
    [("Q4_K", "Q6_K"), ("Q2_K", "Q3_K"), ("Q5_0", "Q8_0"), ("Q4_0", "Q4_1"), ("Q4_1", "Q4_K"), ("Q5_1", "Q4_0")],
)
def test_tensors_of_different_quantized_formats_make_one_matrix_of_integers(kinds):
    rng = np.random.default_rng(4)
    parts = [stored(rng.standard_normal((24, COLUMNS)).astype(np.float32), TensorFormat(kind)) for kind in kinds]
    whole = np.concatenate([part.to_float32() for part in parts])
    weight = packed(parts, "int16", of_integers(BEST))
    found = weight.gather(Now(), np.arange(48, dtype=np.int32))
    np.testing.assert_allclose(found, whole, atol=8e-4 * np.abs(whole).max())
    if isinstance(weight, RowScaledMatrix):
        assert_rounded_to_units(weight, found, whole)
    x = rng.standard_normal((5, COLUMNS)).astype(np.float32)
    scale = (32767, 32) if isinstance(weight, IntegerMatrix) else (LARGEST, COLUMNS)
    right = rounded(x, *scale) @ found.astype(np.float64).T
    np.testing.assert_allclose(product(weight, x), right, rtol=1e-4, atol=2e-4 + 5e-6 * np.abs(right).max())


def test_a_set_that_the_processor_lacks_is_refused(monkeypatch):
    assert set(CPU_ISAS) == {AUTO, *ISAS}
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"avx2": True, "f16c": True})
    assert choose() == "avx2"
    assert choose("portable") == "portable"
    with pytest.raises(ValueError, match="this processor has portable, avx2, not avx512-vnni"):
        choose("avx512-vnni")


def test_tensors_of_different_formats_make_one_matrix():
    rng = np.random.default_rng(2)
    parts = [stored(rng.standard_normal((32, COLUMNS)).astype(np.float32), kind) for kind in FORMATS]
    x = rng.standard_normal((3, COLUMNS)).astype(np.float32)
    expected = np.concatenate([x @ part.to_float32().T for part in parts], axis=1)
    np.testing.assert_allclose(product(pack(parts), x), expected, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("compute", ["float32", "int8", "int16"])
def test_a_matrix_of_any_two_formats_has_the_weights_of_the_file(compute):
    backend = CpuBackend([], 1e-5, 1024, compute)
    rng = np.random.default_rng(6)
    values = [rng.standard_normal((24, COLUMNS)).astype(np.float32) for _ in range(2)]
    for kinds in itertools.product(FORMATS, repeat=2):
        parts = [stored(of, kind) for of, kind in zip(values, kinds, strict=True)]
        whole = np.concatenate([part.to_float32() for part in parts])
        weight = backend.pack(parts)
        found = weight.gather(Now(), np.arange(48, dtype=np.int32))
        error = np.abs(found - whole).max(axis=1) / np.abs(whole).max(axis=1)
        limit = {4: 2e-4, 5: 5e-4, 6: 1e-3}[weight.form.bits] if isinstance(weight, RowScaledMatrix) else 0
        assert error.max() <= limit, kinds


def test_pointwise_operations():
    rng = np.random.default_rng(6)
    x = (rng.standard_normal((5, 128)) * 4).astype(np.float32)
    weight = rng.standard_normal(128).astype(np.float32)
    normed = torch.nn.functional.rms_norm(torch.from_numpy(x), (128,), torch.from_numpy(weight), 1e-5)
    ours = prepare(Now(), x, 128, Preparation(NORM, weight, 1e-5))
    np.testing.assert_allclose(ours, normed.numpy(), rtol=1e-5, atol=1e-6)
    x[0, :3] = [-100.0, 100.0, 0.0]
    gate, up = torch.from_numpy(x).chunk(2, dim=1)
    expected = (torch.nn.functional.silu(gate) * up).numpy()
    ours = prepare(Now(), x, 64, Preparation(SWIGLU))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    ours = prepare(Now(), x, 64, Preparation(GEGLU))
    expected = torch.nn.functional.gelu(gate, approximate="tanh") * up
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-5, atol=1e-5)
    ours = prepare(Now(), x, 64, Preparation(CLAMPED, np.array([1.702, 7.0], np.float32)))
    low, high = gate.clamp(max=7), up.clamp(-7, 7)
    expected = low * torch.sigmoid(1.702 * low) * (high + 1)
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-5, atol=1e-5)
