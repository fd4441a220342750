"""Mamba2, and hybrids with attention: Falcon-H1 in every layer, Granite 4 in most."""

from __future__ import annotations

from typing import Any

from freehold.models.families.config import HfConfig
from freehold.models.families.family import RULES, Family, half
from freehold.models.families.rules import MAMBA_NORM, PRE_NORMS, Rule
from freehold.models.spec import Dense, Experts, LayerSpec, Mamba2, Routing

MAMBA_CONTEXT = 32_768  # a state is unbounded; a page table is finite

_MAMBA_RULES = (
    Rule(r"embedding\.weight", "embeddings.weight"),
    Rule(r"norm\.weight", "norm_f.weight"),
    Rule(r"mixer_norm\.weight", "norm.weight"),
    *(
        Rule(rule.pattern, rule.source.replace("mamba.", "mixer."), rule.change)
        for rule in RULES
        if rule.source.startswith("mamba.")
    ),
)
_FALCON_RULES = (
    Rule(r"norm\.weight", "final_layernorm.weight"),
    Rule(r"ffn_norm\.weight", "pre_ff_layernorm.weight"),
    Rule(r"ffn\.(gate|up|down)\.(\w+)", r"feed_forward.\1_proj.\2"),
)
_GRANITE_RULES = (
    Rule(r"experts\.router\.weight", "block_sparse_moe.router.layer.weight"),
    Rule(r"experts\.(\d+)\.gate\.weight", "block_sparse_moe.input_linear.weight", half(0), True),
    Rule(r"experts\.(\d+)\.up\.weight", "block_sparse_moe.input_linear.weight", half(1), True),
    Rule(r"experts\.(\d+)\.down\.weight", "block_sparse_moe.output_linear.weight", is_stacked=True),
    Rule(r"(?:shared|ffn)\.gate\.weight", "shared_mlp.input_linear.weight", half(0)),
    Rule(r"(?:shared|ffn)\.up\.weight", "shared_mlp.input_linear.weight", half(1)),
    Rule(r"(?:shared|ffn)\.down\.weight", "shared_mlp.output_linear.weight"),
)


def _limit(config: HfConfig) -> tuple[float, float]:
    """Return the limits of time steps. Newer files write infinity as an object with a string."""
    low, high = config.get("time_step_limit", [0.0, float("inf")])
    return float(low), float("inf") if isinstance(high, dict) else float(high)


def _mamba2(config: HfConfig) -> list[LayerSpec]:
    mamba = Mamba2(
        head_count=config.int("num_heads"),
        head_size=config.int("head_dim"),
        state_size=config.int("state_size"),
        group_count=config.int("n_groups"),
        taps=config.int("conv_kernel"),
        time_step_limit=_limit(config),
    )
    return [LayerSpec((mamba,), None)] * config.layer_count


def _mamba2_model(config: HfConfig) -> dict[str, Any]:
    context = int(config.get("max_position_embeddings", MAMBA_CONTEXT))
    return {"norm_epsilon": float(config.get("layer_norm_epsilon", 1e-5)), "context_length": context}


def _hybrid_mamba(config: HfConfig, **fields: Any) -> Mamba2:
    return Mamba2(
        head_count=config.int("mamba_n_heads"),
        head_size=config.int("mamba_d_head"),
        state_size=config.int("mamba_d_state"),
        group_count=config.int("mamba_n_groups"),
        taps=config.int("mamba_d_conv"),
        time_step_limit=_limit(config),
        **fields,
    )


def _falcon_h1(config: HfConfig) -> list[LayerSpec]:
    into = float(config.get("ssm_in_multiplier", 1.0))
    gate, x, b, c, step = (into * float(factor) for factor in config.get("ssm_multipliers", [1.0] * 5))
    norm_first = bool(config.get("mamba_norm_before_gate", True)) and bool(config.get("mamba_rms_norm"))
    mamba = _hybrid_mamba(config, multipliers=(gate, x, b, c, step), norm_before_gate=norm_first)
    attention = config.attention(
        config.rotary(config.head_size),
        input_multiplier=float(config.get("attention_in_multiplier", 1.0)),
        key_multiplier=float(config.get("key_multiplier", 1.0)),
    )
    gate_multiplier, down_multiplier = config.get("mlp_multipliers", [1.0, 1.0])
    outs = (float(config.get("ssm_out_multiplier", 1.0)), float(config.get("attention_out_multiplier", 1.0)))
    dense = config.dense(gate_multiplier=float(gate_multiplier))
    return [LayerSpec((mamba, attention), dense, outs, float(down_multiplier))] * config.layer_count


def _falcon_model(config: HfConfig) -> dict[str, Any]:
    return {
        "embedding_multiplier": float(config.get("embedding_multiplier", 1.0)),
        "logit_multiplier": float(config.get("lm_head_multiplier", 1.0)),
    }


def _granite(config: HfConfig) -> list[LayerSpec]:
    rotary = config.rotary(config.head_size) if config.get("position_embedding_type") == "rope" else None
    attention = config.attention(rotary, scale=float(config.get("attention_multiplier", 1.0)))
    multiplier, shared = float(config.get("residual_multiplier", 1.0)), config.int("shared_intermediate_size")
    ffn: Dense | Experts = config.dense(shared)
    if count := int(config.get("num_local_experts", 0)):
        routing = Routing(config.int("num_experts_per_tok"), scores="chosen", normalize=False)
        ffn = Experts(count, config.int("intermediate_size"), routing, config.activation(), shared)
    mixers = {"full_attention": attention, "linear_attention": _hybrid_mamba(config)}
    kinds = config.layer_types(["linear_attention"] * config.layer_count)
    return [LayerSpec((mixers[kind],), ffn, (multiplier,), multiplier) for kind in kinds]


def _granite_model(config: HfConfig) -> dict[str, Any]:
    return {
        "embedding_multiplier": float(config.get("embedding_multiplier", 1.0)),
        "logit_multiplier": 1 / float(config.get("logits_scaling", 1.0)),
    }


FAMILIES = {
    "mamba2": Family(_mamba2, lambda _: _MAMBA_RULES, _mamba2_model, root="backbone.", parts=(PRE_NORMS, MAMBA_NORM)),
    "falcon_h1": Family(_falcon_h1, lambda _: _FALCON_RULES, _falcon_model),
    "granitemoehybrid": Family(_granite, lambda _: _GRANITE_RULES, _granite_model, parts=(PRE_NORMS, MAMBA_NORM)),
}
