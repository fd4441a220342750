"""LFM2: short convolutions in most layers, attention in some."""

from __future__ import annotations

from typing import Any

from freehold.models.families.config import HfConfig
from freehold.models.families.family import Family, taps
from freehold.models.families.rules import PRE_NORMS, QK_NORMS, Rule
from freehold.models.spec import LayerSpec, ShortConv

_RULES = (
    Rule(r"norm\.weight", "embedding_norm.weight"),
    Rule(r"mixer_norm\.weight", "operator_norm.weight"),
    Rule(r"ffn_norm\.weight", "ffn_norm.weight"),
    Rule(r"attention\.output\.weight", "self_attn.out_proj.weight"),
    Rule(r"attention\.([qk])_norm\.weight", r"self_attn.\1_layernorm.weight"),
    Rule(r"conv\.input\.(\w+)", r"conv.in_proj.\1"),
    Rule(r"conv\.output\.(\w+)", r"conv.out_proj.\1"),
    Rule(r"conv\.taps\.weight", "conv.conv.weight", taps),
    Rule(r"conv\.taps\.bias", "conv.conv.bias"),
    Rule(r"ffn\.gate\.weight", "feed_forward.w1.weight"),
    Rule(r"ffn\.up\.weight", "feed_forward.w3.weight"),
    Rule(r"ffn\.down\.weight", "feed_forward.w2.weight"),
)


def _lfm2(config: HfConfig) -> list[LayerSpec]:
    full = config.get("full_attn_idxs", [])
    kinds = ["full_attention" if layer in full else "conv" for layer in range(config.layer_count)]
    attention = config.attention(config.rotary(config.head_size, theta=1_000_000.0))
    mixers = {"full_attention": attention, "conv": ShortConv(config.int("hidden_size"), config.int("conv_L_cache"))}
    dense = config.dense(_ffn_size(config))
    return [LayerSpec((mixers[kind],), dense) for kind in config.layer_types(kinds)]


def _ffn_size(config: HfConfig) -> int:
    size = int(config.get("block_ff_dim") or config.int("intermediate_size"))
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    multiple = int(config.get("block_multiple_of", 256))
    return -(-size // multiple) * multiple


def _model(config: HfConfig) -> dict[str, Any]:
    return {"norm_epsilon": float(config.get("norm_eps", 1e-5))}


FAMILIES = {"lfm2": Family(_lfm2, lambda _: _RULES, _model, parts=(PRE_NORMS, QK_NORMS))}
