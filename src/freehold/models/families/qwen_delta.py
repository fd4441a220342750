"""Qwen3-Next and Qwen3.5: the gated delta rule in three of four layers, gated attention in the fourth."""

from __future__ import annotations

import re

import numpy as np

from freehold.models.families.config import HfConfig
from freehold.models.families.family import Array, Change, Family, decay, taps
from freehold.models.families.llama import has_experts, qwen_experts
from freehold.models.families.rules import PRE_NORMS, QK_NORMS, SHARED_ROUTER, Rule
from freehold.models.spec import Dense, Experts, GatedDelta, LayerSpec

_DELTA = (
    Rule(r"delta\.taps\.weight", "linear_attn.conv1d.weight", taps),
    Rule(r"delta\.decay", "linear_attn.A_log", decay),
    Rule(r"delta\.step_bias", "linear_attn.dt_bias"),
    Rule(r"delta\.norm\.weight", "linear_attn.norm.weight"),
    Rule(r"delta\.output\.weight", "linear_attn.out_proj.weight"),
)
_QWEN35 = (
    *_DELTA,
    Rule(r"delta\.qkv\.weight", "linear_attn.in_proj_qkv.weight"),
    Rule(r"delta\.gate\.weight", "linear_attn.in_proj_z.weight"),
    Rule(r"delta\.strength\.weight", "linear_attn.in_proj_b.weight"),
    Rule(r"delta\.step\.weight", "linear_attn.in_proj_a.weight"),
)


def _delta(config: HfConfig) -> GatedDelta:
    return GatedDelta(
        key_head_count=config.int("linear_num_key_heads"),
        value_head_count=config.int("linear_num_value_heads"),
        key_size=config.int("linear_key_head_dim"),
        value_size=config.int("linear_value_head_dim"),
        taps=config.int("linear_conv_kernel_dim"),
    )


def _layers(config: HfConfig) -> list[LayerSpec]:
    every = config.get("full_attention_interval", 4)
    kinds = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(config.layer_count)]
    rotary = config.rotary(int(config.head_size * config.rotated_share()))
    mixers = {
        "full_attention": config.attention(rotary, output_gate=True),
        "linear_attention": _delta(config),
    }

    def ffn(layer: int) -> Dense | Experts:
        return qwen_experts(config, True) if has_experts(config, layer) else config.dense()

    return [LayerSpec((mixers[kind],), ffn(layer)) for layer, kind in enumerate(config.layer_types(kinds))]


def _next_rules(config: HfConfig) -> list[Rule]:
    """Return the rules. Qwen3-Next stores rows of queries, keys, values and gates in one tensor, grouped by key head,
    and those of strengths and time steps in another."""
    delta = _delta(config)
    values = delta.value_head_count // delta.key_head_count
    wide = [delta.key_size, delta.key_size, values * delta.value_size, values * delta.value_size]

    def parts(sizes: list[int], *chosen: int) -> Change:
        def change(stored: Array, match: re.Match[str]) -> Array:
            columns = stored.shape[-1]
            by_head = np.split(stored.reshape(delta.key_head_count, -1, columns), np.cumsum(sizes)[:-1], axis=1)
            return np.concatenate([by_head[part].reshape(-1, columns) for part in chosen])

        return change

    return [
        *_DELTA,
        Rule(r"delta\.qkv\.weight", "linear_attn.in_proj_qkvz.weight", parts(wide, 0, 1, 2)),
        Rule(r"delta\.gate\.weight", "linear_attn.in_proj_qkvz.weight", parts(wide, 3)),
        Rule(r"delta\.strength\.weight", "linear_attn.in_proj_ba.weight", parts([values, values], 0)),
        Rule(r"delta\.step\.weight", "linear_attn.in_proj_ba.weight", parts([values, values], 1)),
        Rule(r"shared\.(gate|up|down)\.weight", r"mlp.shared_expert.\1_proj.weight"),
        Rule(r"shared\.router\.weight", "mlp.shared_expert_gate.weight"),
    ]


_DEFAULTS = {"partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4}
_NORMS = r"(?!.*delta).*norm"  # norms of states have no offset
_PARTS = (PRE_NORMS, QK_NORMS)
FAMILIES = {
    "qwen3_next": Family(_layers, _next_rules, offset_norms=_NORMS, defaults=_DEFAULTS, parts=(*_PARTS, SHARED_ROUTER)),
    "qwen3_5_text": Family(_layers, lambda _: _QWEN35, offset_norms=_NORMS, defaults=_DEFAULTS, parts=_PARTS),
}
