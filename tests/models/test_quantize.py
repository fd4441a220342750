"""Weights that are floats in a file, and a few bits in memory."""

import gguf
import numpy as np
import pytest

from freehold.contract.step import KVShape
from freehold.engine.cpu.codes import codes_of
from freehold.engine.cpu.device import CpuDevice
from freehold.engine.placed_model import PlacedModel
from freehold.models.loading.resolve import open_checkpoint
from freehold.models.quantize import Quantizer
from freehold.models.tensor import StoredTensor, TensorFormat
from random_tensors import stored

RNG = np.random.default_rng(2)
VALUES = RNG.standard_normal((40, 512)).astype(np.float32)


def error(tensor: StoredTensor, values: np.ndarray) -> float:
    return float(np.sqrt(np.square(tensor.to_float32() - values).mean() / np.square(values).mean()))


@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("kind", "bits", "most"), [("Q8_0", 8.5, 0.007), ("Q4_1", 5, 0.09), ("Q4_K", 4.5, 0.09)])
def test_floats_become_the_format_that_was_asked_for(source, kind, bits, most):
    tensor = stored(VALUES, TensorFormat(source))
    quantizer = Quantizer(TensorFormat(kind))
    made = quantizer.convert(tensor)
    assert made.format == kind
    assert made.data.nbytes == VALUES.size * bits / 8
    assert error(made, tensor.to_float32()) < most
    shown = f"{error(made, tensor.to_float32()):.2%}"
    assert quantizer.report.endswith(f"error of weights {shown}")


def test_a_super_block_is_as_near_as_what_llama_cpp_would_make():
    """Their minimum of errors for normal numbers, in 4.5 bits, is 7.4 %; steps of equal width between the least and the
    greatest make 8.3 %."""
    assert error(Quantizer(TensorFormat.Q4_K).convert(stored(VALUES, TensorFormat.F32)), VALUES) < 0.079


@pytest.mark.parametrize("values", [
    np.zeros((4, 256), np.float32),
    np.full((4, 256), 0.25, np.float32),
    np.full((4, 256), -3.0, np.float32),
    np.where(np.arange(256) == 7, 100, 0).astype(np.float32)[None],
    np.repeat(np.array([[1e-6, 1.0]], np.float32), 128, axis=1),
])  # fmt: skip
def test_blocks_without_a_range_keep_their_values(values):
    made = Quantizer(TensorFormat.Q4_K).convert(stored(values, TensorFormat.F32))
    np.testing.assert_allclose(made.to_float32(), values, atol=2e-2 * max(np.abs(values).max(), 1e-9))


def test_the_engine_reads_super_blocks_as_gguf_does():
    made = Quantizer(TensorFormat.Q4_K).convert(stored(VALUES, TensorFormat.F32))
    codes = codes_of(made)
    found = codes.codes * np.repeat(codes.scales, 16, axis=1) + np.repeat(codes.minimums, 16, axis=1)
    np.testing.assert_allclose(found, gguf.dequantize(made.data, gguf.GGMLQuantizationType.Q4_K), atol=1e-6)


@pytest.mark.parametrize(("kind", "columns", "becomes"), [
    ("Q4_K", 96, "Q4_1"), ("Q4_K", 40, "F32"), ("Q8_0", 40, "F32"), ("Q8_0", 96, "Q8_0"),
])  # fmt: skip
def test_columns_that_fill_no_block(kind, columns, becomes):
    tensor = stored(VALUES[:, :columns].copy(), TensorFormat.F32)
    assert Quantizer(TensorFormat(kind)).convert(tensor).format == becomes


def test_what_is_quantized_already_stays():
    tensor = stored(VALUES, TensorFormat.Q5_0)
    quantizer = Quantizer(TensorFormat.Q8_0)
    assert quantizer.convert(tensor) is tensor
    assert "no matrices of floats" in quantizer.report


def test_tokens_are_read_and_scored_with_eight_bits():
    assert Quantizer(TensorFormat.Q4_K).convert_vocabulary(stored(VALUES, TensorFormat.BF16)).format == "Q8_0"


def test_a_matrix_that_is_converted_in_parts_is_the_same(monkeypatch):
    tensor = stored(VALUES, TensorFormat.F32)
    whole = Quantizer(TensorFormat.Q4_K).convert(tensor)
    monkeypatch.setattr("freehold.models.quantize.ROWS_AT_A_TIME", 512 * 7)
    np.testing.assert_array_equal(Quantizer(TensorFormat.Q4_K).convert(tensor).data, whole.data)


@pytest.mark.parametrize(("kind", "most"), [("Q8_0", 0.15), ("Q4_1", 1.0)])
def test_a_model_says_nearly_the_same(kind, most, folders):
    """Random weights make much of small errors. What matters is that all matrices are converted, and nothing else."""
    checkpoint = open_checkpoint(folders("llama"))
    quantizer = Quantizer(TensorFormat(kind))
    plain, ours = logits(checkpoint, None), logits(checkpoint, quantizer)
    difference = float(np.sqrt(np.square(ours - plain).mean() / np.square(plain).mean()))
    assert 0 < difference < most
    assert quantizer.report.endswith("%"), "some were"


def logits(checkpoint, quantizer):
    """Of 40 tokens as one prompt."""
    layouts, device = checkpoint.spec.cache_layouts(), CpuDevice(quantizer=quantizer)
    device.prepare_thread()
    model = PlacedModel(checkpoint, device, KVShape((3,) * len(layouts), 16, 1, 48), layouts, "int16")
    columns = np.arange(3, dtype=np.int32)
    model.update_pages([(np.zeros(3, np.int32), columns, columns + 1)] * len(layouts))
    zero = np.zeros(1, np.int64)
    tokens = np.arange(40, dtype=np.int32) + 5
    return model.logits(model.forward(tokens, model.batch(zero, zero, zero + len(tokens))))
