"""Llama and its descendants: Mistral, Qwen2, Qwen3, SmolLM3, and Qwen3 with experts."""

from __future__ import annotations

from freehold.models.families.config import HfConfig
from freehold.models.families.family import Family
from freehold.models.families.rules import PRE_NORMS, QK_NORMS, QKV_BIASES
from freehold.models.spec import Dense, Experts, LayerSpec, Routing


def _llama(config: HfConfig) -> list[LayerSpec]:
    layer = LayerSpec((config.attention(config.rotary(config.head_size)),), config.dense())
    return [layer] * config.layer_count


def _mistral(config: HfConfig) -> list[LayerSpec]:
    attention = config.attention(config.rotary(config.head_size), window=config.window())
    return [LayerSpec((attention,), config.dense())] * config.layer_count


def _windows(config: HfConfig) -> list[int | None]:
    """Return the window of each layer. Qwen's and SmolLM3's are off unless `use_sliding_window` is set."""
    count, first = config.layer_count, config.get("max_window_layers", 0)
    kinds = config.layer_types(["sliding_attention" if layer >= first else "full_attention" for layer in range(count)])
    window = config.window() if config.get("use_sliding_window") else None
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _qwen(config: HfConfig) -> list[LayerSpec]:
    rotary = config.rotary(config.head_size)
    return [LayerSpec((config.attention(rotary, window=window),), config.dense()) for window in _windows(config)]


def _smollm3(config: HfConfig) -> list[LayerSpec]:
    rotary, interval = config.rotary(config.head_size), config.get("no_rope_layer_interval", 4)
    default = [int((layer + 1) % interval != 0) for layer in range(config.layer_count)]
    rotated = config.get("no_rope_layers", default)
    return [
        LayerSpec((config.attention(rotary if turns else None, window=window),), config.dense())
        for turns, window in zip(rotated, _windows(config), strict=True)
    ]


def has_experts(config: HfConfig, layer: int) -> bool:
    """Return whether a Qwen layer has experts: every few layers, with exceptions."""
    is_sparse = (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    return is_sparse and layer not in config.get("mlp_only_layers", []) and _expert_count(config) > 0


def _expert_count(config: HfConfig) -> int:
    """Return the expert count. Newer files use Mixtral's field name."""
    return int(config.get("num_experts") or config.get("num_local_experts", 0))


def qwen_experts(config: HfConfig, normalize: bool) -> Experts:
    """Return the experts; `normalize` is the default for normalizing the chosen experts' weights."""
    normalize = bool(config.get("norm_topk_prob", normalize))
    routing = Routing(config.int("num_experts_per_tok"), normalize=normalize)
    size, shared = config.int("moe_intermediate_size"), int(config.get("shared_expert_intermediate_size", 0))
    return Experts(_expert_count(config), size, routing, config.activation(), shared)


def _qwen_moe(config: HfConfig) -> list[LayerSpec]:
    rotary = config.rotary(config.head_size)

    def ffn(layer: int) -> Dense | Experts:
        return qwen_experts(config, False) if has_experts(config, layer) else config.dense()

    windows = enumerate(_windows(config))
    return [LayerSpec((config.attention(rotary, window=window),), ffn(layer)) for layer, window in windows]


FAMILIES = {
    "llama": Family(_llama),
    "mistral": Family(_mistral),
    "qwen2": Family(_qwen, parts=(PRE_NORMS, QKV_BIASES)),
    "qwen3": Family(_qwen, parts=(PRE_NORMS, QK_NORMS)),
    "qwen3_moe": Family(_qwen_moe, parts=(PRE_NORMS, QK_NORMS)),
    "smollm3": Family(_smollm3),
}
