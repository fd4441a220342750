"""Model families: how to read their configurations and find their tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from freehold.models.families.config import HfConfig
from freehold.models.families.rules import ATTENTION_BIASES, MAMBA_NORM, PRE_NORMS, TAPS_BIAS, Rule
from freehold.models.spec import LayerSpec, ModelSpec

Array = np.ndarray[Any, Any]  # float32, float16 or bfloat16
Change = Callable[[Array, re.Match[str]], Array]

# Tensors that these fields of a config.json enable.
_SWITCHES = {
    "attention_bias": ATTENTION_BIASES,
    "mlp_bias": r"ffn\..*bias",
    "conv_bias": r"conv\..*bias",
    "use_conv_bias": TAPS_BIAS,
    "mamba_conv_bias": TAPS_BIAS,
    "use_bias": r"mamba\.(input|output)\.bias",
    "mamba_proj_bias": r"mamba\.input\.bias",
    "mamba_rms_norm": MAMBA_NORM,
}


@dataclass(frozen=True)
class Family:
    """`layers` reads the layers of a config.json, `model` everything else. `rules` precede `RULES`. Norms that match
    `offset_norms` are stored minus 1. Names in the file start with `root`, except the head's. `defaults` are values
    that published files omit. `parts`: as in `ModelSpec`; configuration fields add more."""

    layers: Callable[[HfConfig], Sequence[LayerSpec]]
    rules: Callable[[HfConfig], Sequence[Rule]] = lambda config: ()
    model: Callable[[HfConfig], dict[str, Any]] = lambda config: {}
    offset_norms: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    root: str = "model."
    parts: tuple[str, ...] = (PRE_NORMS,)

    def spec(self, config: HfConfig, tied: bool) -> ModelSpec:
        fields: dict[str, Any] = {
            "architecture": config.architecture,
            "hidden_size": config.int("hidden_size"),
            "vocab_size": config.int("vocab_size"),
            "context_length": config.context_length,
            "norm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
            "tied_embeddings": tied,
            "parts": (*self.parts, *(part for name, part in _SWITCHES.items() if config.get(name))),
        }
        return ModelSpec(**{**fields, **self.model(config), "layers": tuple(self.layers(config))})


def decay(stored: Array, match: re.Match[str]) -> Array:
    return -np.exp(stored.astype(np.float32))


def taps(stored: Array, match: re.Match[str]) -> Array:
    """Reshape [columns, 1, taps] to [columns, taps]."""
    return stored.squeeze(1)


def half(which: int) -> Change:
    """Return a change that takes the first or second half of the rows: gate or up."""
    return lambda stored, match: np.array_split(stored, 2)[which]


# Names of the common Hugging Face layout, that of Llama, DeepSeek and Qwen.
RULES = (
    Rule(r"embedding\.weight", "embed_tokens.weight"),
    Rule(r"norm\.weight", "norm.weight"),
    Rule(r"head\.weight", "lm_head.weight"),
    Rule(r"mixer_norm\.weight", "input_layernorm.weight"),
    Rule(r"ffn_norm\.weight", "post_attention_layernorm.weight"),
    Rule(r"attention\.([qkv])\.(\w+)", r"self_attn.\1_proj.\2"),
    Rule(r"attention\.output\.(\w+)", r"self_attn.o_proj.\1"),
    Rule(r"attention\.([qk]_norm)\.weight", r"self_attn.\1.weight"),
    Rule(r"attention\.sinks", "self_attn.sinks"),
    Rule(r"latent\.q\.weight", "self_attn.q_proj.weight"),
    Rule(r"latent\.q_down\.weight", "self_attn.q_a_proj.weight"),
    Rule(r"latent\.q_norm\.weight", "self_attn.q_a_layernorm.weight"),
    Rule(r"latent\.q_up\.weight", "self_attn.q_b_proj.weight"),
    Rule(r"latent\.kv_down\.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    Rule(r"latent\.kv_norm\.weight", "self_attn.kv_a_layernorm.weight"),
    Rule(r"latent\.kv_up\.weight", "self_attn.kv_b_proj.weight"),
    Rule(r"latent\.output\.weight", "self_attn.o_proj.weight"),
    Rule(r"mamba\.input\.(\w+)", r"mamba.in_proj.\1"),
    Rule(r"mamba\.output\.(\w+)", r"mamba.out_proj.\1"),
    Rule(r"mamba\.taps\.weight", "mamba.conv1d.weight", taps),
    Rule(r"mamba\.taps\.bias", "mamba.conv1d.bias"),
    Rule(r"mamba\.decay", "mamba.A_log", decay),
    Rule(r"mamba\.skip", "mamba.D"),
    Rule(r"mamba\.step_bias", "mamba.dt_bias"),
    Rule(r"mamba\.norm\.weight", "mamba.norm.weight"),
    Rule(r"ffn\.(gate|up|down)\.(\w+)", r"mlp.\1_proj.\2"),
    Rule(r"experts\.router\.(weight|bias)", r"mlp.gate.\1"),
    Rule(r"experts\.router\.correction", "mlp.gate.e_score_correction_bias"),
    Rule(r"experts\.(\d+)\.(gate|up|down)\.(\w+)", r"mlp.experts.\1.\2_proj.\3"),
    Rule(r"shared\.(gate|up|down)\.(\w+)", r"mlp.shared_experts.\1_proj.\2"),
)
