"""Gemma 2 and 3: windows, norms before and after each part, two rotary bases, capped scores."""

from __future__ import annotations

from typing import Any

from freehold.models.families.config import HfConfig
from freehold.models.families.family import Family
from freehold.models.families.rotary import rotary_of
from freehold.models.families.rules import POST_NORMS, PRE_NORMS, QK_NORMS, Rule
from freehold.models.spec import LayerSpec, Rotary

LOCAL_THETA = 10_000.0
GLOBAL_THETA = 1_000_000.0

_RULES = (
    Rule(r"mixer_post_norm\.weight", "post_attention_layernorm.weight"),
    Rule(r"ffn_norm\.weight", "pre_feedforward_layernorm.weight"),
    Rule(r"ffn_post_norm\.weight", "post_feedforward_layernorm.weight"),
)


def _gemma2(config: HfConfig) -> list[LayerSpec]:
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(config.layer_count)]
    rotary = config.rotary(config.head_size)
    return [_layer(config, kind, rotary) for kind in config.layer_types(kinds)]


def _gemma3(config: HfConfig) -> list[LayerSpec]:
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern", 6)
    kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(config.layer_count)]
    size, context = config.head_size, config.context_length
    if config.get("rope_parameters"):
        rotary = {kind: config.rotary(size, kind) for kind in ("sliding_attention", "full_attention")}
    else:
        scaling, theta = config.get("rope_scaling", {}), float(config.get("rope_theta", GLOBAL_THETA))
        local = float(config.get("rope_local_base_freq", LOCAL_THETA))
        rotary = {
            "sliding_attention": rotary_of({}, size, local, context),
            "full_attention": rotary_of(scaling, size, theta, context),
        }
    return [_layer(config, kind, rotary[kind]) for kind in config.layer_types(kinds)]


def _layer(config: HfConfig, kind: str, rotary: Rotary) -> LayerSpec:
    attention = config.attention(
        rotary,
        window=config.window() if kind == "sliding_attention" else None,
        scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        soft_cap=float(config.get("attn_logit_softcapping", 0.0)),
    )
    return LayerSpec((attention,), config.dense())


def _model(config: HfConfig) -> dict[str, Any]:
    return {
        "embedding_multiplier": config.int("hidden_size") ** 0.5,
        "logit_cap": float(config.get("final_logit_softcapping", 0.0)),
    }


_DEFAULTS = {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096,
             "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6}  # fmt: skip
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192}
_SIZES = {"max_position_embeddings": 131_072, "vocab_size": 262_208}

FAMILIES = {
    "gemma2": Family(
        _gemma2, lambda _: _RULES, _model, r".*norm", {**_DEFAULTS, **_CAPS}, parts=(PRE_NORMS, POST_NORMS)
    ),
    "gemma3_text": Family(
        _gemma3, lambda _: _RULES, _model, r".*norm", {**_DEFAULTS, **_SIZES}, parts=(PRE_NORMS, POST_NORMS, QK_NORMS)
    ),
}
