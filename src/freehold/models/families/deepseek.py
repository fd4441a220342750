"""DeepSeek V2, V3 and MiniCPM3, which use latent attention."""

from __future__ import annotations

import math
from typing import Any

from freehold.models.families.config import HfConfig
from freehold.models.families.family import Family
from freehold.models.families.rotary import yarn_magnitude
from freehold.models.spec import Dense, Experts, Latent, LayerSpec, Routing


def _latent(config: HfConfig, is_interleaved: bool) -> Latent:
    plain, turned = config.int("qk_nope_head_dim"), config.int("qk_rope_head_dim")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scale = (plain + turned) ** -0.5
    if (rope.get("rope_type") or rope.get("type") or "default") != "default" and rope.get("mscale_all_dim"):
        scale *= yarn_magnitude(rope["factor"], rope["mscale_all_dim"]) ** 2
    return Latent(
        head_count=config.int("num_attention_heads"),
        rank=config.int("kv_lora_rank"),
        plain_size=plain,
        value_size=config.int("v_head_dim"),
        rotary=config.rotary(turned),
        scale=scale,
        is_interleaved=is_interleaved,
        query_rank=config.get("q_lora_rank"),
    )


def _layers(config: HfConfig, routing: Routing, is_interleaved: bool) -> list[LayerSpec]:
    size, latent = config.int("moe_intermediate_size"), _latent(config, is_interleaved)
    shared = size * int(config.get("n_shared_experts", 0))
    experts = Experts(config.int("n_routed_experts"), size, routing, config.activation(), shared)
    dense = config.int("first_k_dense_replace")

    def ffn(layer: int) -> Dense | Experts:
        is_sparse = layer >= dense and layer % config.get("moe_layer_freq", 1) == 0
        return experts if is_sparse else config.dense()

    return [LayerSpec((latent,), ffn(layer)) for layer in range(config.layer_count)]


def _groups(config: HfConfig) -> dict[str, Any]:
    return {
        "used": config.int("num_experts_per_tok"),
        "factor": float(config.get("routed_scaling_factor", 1.0)),
        "group_count": int(config.get("n_group", 1)),
        "groups_used": int(config.get("topk_group", 1)),
    }


def _deepseek_v2(config: HfConfig) -> list[LayerSpec]:
    groups = _groups(config)
    if config.get("topk_method", "greedy") == "greedy":
        groups["group_count"] = 1
    return _layers(config, Routing(**groups, normalize=False), is_interleaved=True)


def _deepseek_v3(config: HfConfig) -> list[LayerSpec]:
    normalize = bool(config.get("norm_topk_prob", True))
    routing = Routing(**_groups(config), scores="sigmoid", normalize=normalize, group_by_two=True)
    return _layers(config, routing, is_interleaved=bool(config.get("rope_interleave", True)))


def _minicpm3(config: HfConfig) -> list[LayerSpec]:
    multiplier = float(config.get("scale_depth", 1.4)) / math.sqrt(config.layer_count)
    layer = LayerSpec((_latent(config, False),), config.dense(), (multiplier,), multiplier)
    return [layer] * config.layer_count


def _minicpm3_model(config: HfConfig) -> dict[str, Any]:
    return {
        "embedding_multiplier": float(config.get("scale_emb", 1.0)),
        "logit_multiplier": config.get("dim_model_base", 256) / config.int("hidden_size"),
    }


FAMILIES = {
    "deepseek_v2": Family(_deepseek_v2),
    "deepseek_v3": Family(_deepseek_v3),
    "minicpm3": Family(
        _minicpm3, model=_minicpm3_model, defaults={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    ),
}
