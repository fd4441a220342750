"""A small model of each family with random weights in which every part matters."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

WINDOW = 24
SIZES = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
SLIDING = {"sliding_window": WINDOW, "use_sliding_window": True}
IN_TURNS = ["sliding_attention", "full_attention"] * 2
THREE_TO_ONE = ["sliding_attention"] * 3 + ["full_attention"]
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
          "qk_rope_head_dim": 16, "v_head_dim": 16}  # fmt: skip
GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32}
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}
STATE = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
         "mamba_expand": 2, "mamba_chunk_size": 16}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "head_dim": 32,
         "layer_types": ["linear_attention"] * 3 + ["full_attention"]}  # fmt: skip


@dataclass(frozen=True)
class TinyModel:
    """`config`: the name of a class of transformers. With a `window`, opening it changes what the model says."""

    config: str
    fields: dict = field(default_factory=dict)
    window: bool = False
    states: bool = False

    def make_config(self):
        return getattr(transformers, self.config)(**{**SIZES, **self.fields})


TINY_MODELS = {
    "llama": TinyModel("LlamaConfig", {"tie_word_embeddings": True}),
    "llama3-rope": TinyModel("LlamaConfig", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "yarn": TinyModel("LlamaConfig", {"rope_parameters": YARN}),
    "mistral": TinyModel("MistralConfig", {"sliding_window": WINDOW, "head_dim": 48}, window=True),
    "qwen2": TinyModel("Qwen2Config", {**SLIDING, "max_window_layers": 1}, window=True),
    "qwen3": TinyModel("Qwen3Config", {**SLIDING, "head_dim": 32, "layer_types": IN_TURNS}, window=True),
    "smollm3": TinyModel("SmolLM3Config", {"no_rope_layers": [1, 1, 1, 0]}),
    "gemma2": TinyModel("Gemma2Config", {"sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 24,
        "layer_types": IN_TURNS, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}, window=True),
    "gemma3": TinyModel("Gemma3TextConfig", {"sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 24,
        "layer_types": THREE_TO_ONE, "rope_parameters": {"sliding_attention": PLAIN,
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}}, window=True),
    "olmo3": TinyModel("Olmo3Config", {"sliding_window": WINDOW, "layer_types": THREE_TO_ONE}, window=True),
    "gpt-oss": TinyModel("GptOssConfig", {"sliding_window": WINDOW, "head_dim": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "layer_types": IN_TURNS, "intermediate_size": 64,
        "rope_parameters": {**YARN, "beta_fast": 32, "beta_slow": 1, "truncate": False}}, window=True),
    "qwen3-moe": TinyModel("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "deepseek-v2": TinyModel("DeepseekV2Config", {**LATENT, **GROUPS, "q_lora_rank": None, "first_k_dense_replace": 1,
        "n_shared_experts": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5,
        "rope_parameters": DEEPSEEK_YARN}),
    "deepseek-v3": TinyModel("DeepseekV3Config", {**LATENT, **GROUPS, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "rope_parameters": DEEPSEEK_YARN}),
    "minicpm3": TinyModel("MiniCPM3Config", {**LATENT, "dim_model_base": 32}),
    "mamba2": TinyModel("Mamba2Config", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2,
        "chunk_size": 16, "expand": 2}, states=True),
    "lfm2": TinyModel("Lfm2Config", {"block_auto_adjust_ff_dim": False, "conv_L_cache": 3, "full_attn_idxs": [1, 3]},
        states=True),
    "falcon-h1": TinyModel("FalconH1Config", {**STATE, "mamba_d_ssm": 128, "key_multiplier": 0.5,
        "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.8, "attention_in_multiplier": 1.1,
        "attention_out_multiplier": 0.9, "ssm_multipliers": [0.7, 0.5, 1.2, 0.9, 1.1], "mlp_multipliers": [0.9, 1.3],
        "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0}, states=True),
    "granite4": TinyModel("GraniteMoeHybridConfig", {**STATE, "num_local_experts": 4, "num_experts_per_tok": 2,
        "intermediate_size": 32, "shared_intermediate_size": 64, "position_embedding_type": "nope",
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625,
        "logits_scaling": 2.0,
        "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"]}, states=True),
    "qwen3-next": TinyModel("Qwen3NextConfig", {**DELTA, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}, states=True),
    "qwen3.5": TinyModel("Qwen3_5TextConfig", DELTA, states=True),
}  # fmt: skip


def prompts_of(counts, seed: int = 0) -> list[list[int]]:
    """Of random tokens, of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 258, count).tolist() for count in counts]


def save_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {char: i + 2 for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def save_random(config, seed: int, dtype: torch.dtype, folder: Path) -> None:
    """A model of random weights, with a tokenizer of bytes."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        buffers = [(name, one) for name, one in model.named_buffers() if "e_score_correction_bias" in name]
        for name, weights in [*model.named_parameters(), *buffers]:
            _randomize(name.lower(), weights)
        if model.config.tie_word_embeddings:
            _break_ties(model)
    model.tie_weights()
    model.to(dtype).save_pretrained(folder)
    save_tokenizer(folder)


def _randomize(name: str, weights: torch.Tensor) -> None:
    """Larger than the initial ones, so that attention attends, states remember and biases matter."""
    spread = 1 / math.sqrt(weights.shape[-1])
    if "a_log" in name:
        weights.uniform_(0.02, 1.0).log_()  # memories from long to short
    elif name.endswith(".d"):
        weights.normal_(1.0, 0.2)
    elif "norm" in name and weights.ndim == 1:
        weights.add_(torch.randn(weights.shape) * 0.2)  # around what it was: 1, or 0 for those that are added to 1
    elif weights.ndim == 1 or "embed" in name:
        weights.normal_(0.0, 0.3)
    else:
        weights.normal_(0.0, 1.5 * spread)


def _break_ties(model) -> None:
    """With tied embeddings a model repeats its last token for ever, unless signs of the last norm differ."""
    for name, weights in model.named_parameters():
        if "norm" in name and ".layers." not in name and weights.ndim == 1:
            one = 1.0 if "Gemma" in type(model).__name__ else 0.0
            sign = torch.randint(0, 2, weights.shape) * 2 - 1
            weights.copy_(sign * (weights + one) - one)
