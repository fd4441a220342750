"""gpt-oss: windows in every other layer, attention sinks, experts with a clamped activation."""

from __future__ import annotations

import re

from freehold.models.families.config import HfConfig
from freehold.models.families.family import Array, Change, Family
from freehold.models.families.rules import ATTENTION_BIASES, EXPERT_BIASES, PRE_NORMS, SINKS, Rule
from freehold.models.spec import Activation, Experts, LayerSpec, Routing


def _every_other(which: int) -> Change:
    """Return a change that takes gate or up, which alternate: [inputs, outputs], or biases [outputs]."""

    def change(stored: Array, match: re.Match[str]) -> Array:
        part = stored[..., which::2]
        return part.T if part.ndim == 2 else part

    return change


def _transposed(stored: Array, match: re.Match[str]) -> Array:
    return stored.T


_RULES = (
    Rule(r"experts\.(\d+)\.gate\.weight", "mlp.experts.gate_up_proj", _every_other(0), True),
    Rule(r"experts\.(\d+)\.up\.weight", "mlp.experts.gate_up_proj", _every_other(1), True),
    Rule(r"experts\.(\d+)\.gate\.bias", "mlp.experts.gate_up_proj_bias", _every_other(0), True),
    Rule(r"experts\.(\d+)\.up\.bias", "mlp.experts.gate_up_proj_bias", _every_other(1), True),
    Rule(r"experts\.(\d+)\.down\.weight", "mlp.experts.down_proj", _transposed, True),
    Rule(r"experts\.(\d+)\.down\.bias", "mlp.experts.down_proj_bias", is_stacked=True),
    Rule(r"experts\.router\.(weight|bias)", r"mlp.router.\1"),
)


def _gpt_oss(config: HfConfig) -> list[LayerSpec]:
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(config.layer_count)]
    rotary = config.rotary(config.head_size, theta=150_000.0)
    clamped = Activation("clamped", float(config.get("swiglu_alpha", 1.702)), float(config.get("swiglu_limit", 7.0)))
    routing = Routing(config.int("num_experts_per_tok"), scores="chosen", normalize=False)
    experts = Experts(config.int("num_local_experts"), config.int("intermediate_size"), routing, clamped)
    return [
        LayerSpec((config.attention(rotary, window=config.window() if kind == "sliding_attention" else None),), experts)
        for kind in config.layer_types(kinds)
    ]


_PARTS = (PRE_NORMS, ATTENTION_BIASES, EXPERT_BIASES, SINKS)
FAMILIES = {"gpt_oss": Family(_gpt_oss, lambda _: _RULES, parts=_PARTS)}
