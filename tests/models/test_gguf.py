"""Our reader of GGUF files against the one of the `gguf` package, and against damaged files."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf_writer import write_gguf
from test_families import own_logits
from tiny_models import DEEPSEEK_YARN, TINY_MODELS, save_random
from transformers import AutoModelForCausalLM

from freehold.bench.fetched_models import GEMMA3_270M
from freehold.models.loading.gguf_layout import read_layout
from freehold.models.loading.resolve import open_checkpoint


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.number", 7)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "gr\u00fcn")
    writer.add_array("a.words", ["one", "", "\u4e8c"])
    writer.add_array("a.scores", [1.5, -2.0])
    rng = np.random.default_rng(0)
    writer.add_tensor("plain", rng.standard_normal((3, 64)).astype(np.float32))
    packed = gguf.quantize(rng.standard_normal((5, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_reads_what_the_reference_reads(file):
    fields, tensors = read_layout(file)
    reference = gguf.GGUFReader(file)
    own = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert fields == own
    assert {tensor.name for tensor in reference.tensors} == tensors.keys()
    for tensor in reference.tensors:
        ours = tensors[tensor.name]
        assert (ours.shape, ours.kind) == (tuple(tensor.shape.tolist()), tensor.tensor_type)
        np.testing.assert_array_equal(ours.data, np.asarray(tensor.data).view(np.uint8).ravel())


def test_fields_are_what_they_were_when_the_file_was_opened(file):
    fields, _ = read_layout(file)
    before = dict(fields)
    with file.open("r+b") as writing:
        writing.write(bytes(200))
    assert dict(fields) == before


def test_a_file_that_is_cut_short_is_refused_wherever_it_is_cut(file, tmp_path):
    whole = file.read_bytes()
    for length in range(1, len(whole) - 12, 7):  # the last tensor is padded by 12 bytes
        short = tmp_path / "short.gguf"
        short.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"short\.gguf"):
            read_layout(short)


def test_other_files_are_refused(file, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK" + file.read_bytes()[2:])
    with pytest.raises(ValueError, match="not a GGUF file"):
        read_layout(other)
    other.write_bytes(b"GGUF" + (99).to_bytes(4, "little") + file.read_bytes()[8:])
    with pytest.raises(ValueError, match="version 99"):
        read_layout(other)


GGUF_FAMILIES = ["llama", "qwen3", "qwen3-moe", "smollm3", "gemma2", "gemma3", "gpt-oss", "deepseek-v2", "deepseek-v3",
                 "minicpm3", "lfm2", "mamba2", "falcon-h1", "granite4", "olmo3", "qwen3-next", "qwen3.5"]  # fmt: skip
# What llama.cpp fixes in its code for an architecture, and a small model can't choose.
DEEPSEEK = {"rope_parameters": {**DEEPSEEK_YARN, "mscale": DEEPSEEK_YARN["mscale_all_dim"]}}
FIXED = {
    "deepseek-v2": DEEPSEEK,
    "deepseek-v3": DEEPSEEK,
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "num_hidden_layers": 6,
               "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    "qwen3": {"use_sliding_window": False, "layer_types": ["full_attention"] * 4},
    "qwen3-moe": {"mlp_only_layers": [], "norm_topk_prob": True},
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", GGUF_FAMILIES)
def test_a_gguf_file_says_what_the_folder_says(name, tmp_path):
    """The same weights in both formats give the same logits. llama.cpp's converter is not here: what it changes is
    written in `gguf_writer.py`, its names are from the `gguf` package."""
    model = TINY_MODELS[name]
    config = replace(model, fields={**model.fields, **FIXED.get(name, {})}).make_config()
    save_random(config, 5, torch.float32, tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf")
    tokens = np.random.default_rng(0).integers(2, 258, 90).tolist()
    expected = own_logits(tmp_path, tokens, [90])
    np.testing.assert_allclose(own_logits(tmp_path / "model.gguf", tokens, [90]), expected, atol=1e-4)


def test_experts_in_a_format_without_a_kernel(tmp_path):
    """Matrices of one expert are unpacked from the tensor of all."""
    model = TINY_MODELS["qwen3-moe"]
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, **FIXED["qwen3-moe"]}
    save_random(replace(model, fields={**model.fields, **sizes}).make_config(), 5, torch.float32, tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q5_1)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    _, tensors = read_layout(tmp_path / "model.gguf")
    whole = gguf.dequantize(
        tensors["blk.1.ffn_up_exps.weight"].data.reshape(4 * 256, -1), gguf.GGMLQuantizationType.Q5_1
    ).reshape(4, 256, 256)
    for expert in range(4):
        np.testing.assert_array_equal(
            checkpoint.tensor(f"layers.1.experts.{expert}.up.weight").to_float32(), whole[expert]
        )


@pytest.mark.exact
def test_gemma3_as_transformers_reads_it():
    """A real model with windows, beyond them."""
    path = GEMMA3_270M.path()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = np.random.default_rng(0).integers(1000, 50000, 700).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].float().numpy()
    own = own_logits(path, tokens, [512, 188])
    np.testing.assert_allclose(own, expected, atol=2e-3)  # logits as large as 60
    assert (own.argmax(axis=1) == expected.argmax(axis=1)).all()
