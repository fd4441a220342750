"""OLMo 3: norms after each part instead of before, and query and key norms over all heads."""

from __future__ import annotations

from freehold.models.families.config import HfConfig
from freehold.models.families.family import Family
from freehold.models.families.rotary import rotary_of
from freehold.models.families.rules import ABSENT, POST_NORMS, QK_NORMS, Rule
from freehold.models.spec import LayerSpec

_RULES = (
    Rule(r"mixer_norm\.weight", ABSENT),
    Rule(r"mixer_post_norm\.weight", "post_attention_layernorm.weight"),
    Rule(r"ffn_norm\.weight", ABSENT),
    Rule(r"ffn_post_norm\.weight", "post_feedforward_layernorm.weight"),
)


def _olmo3(config: HfConfig) -> list[LayerSpec]:
    kinds = ["sliding_attention" if (layer + 1) % 4 else "full_attention" for layer in range(config.layer_count)]
    size, theta = config.head_size, float(config.get("rope_theta", 500_000.0))
    rotary = {kind: config.rotary(size, kind, theta) for kind in ("sliding_attention", "full_attention")}
    if not config.get("rope_parameters"):  # scaling for longer contexts applies only to full layers
        rotary["sliding_attention"] = rotary_of({}, size, theta, config.context_length)
    windows = {"sliding_attention": config.window()}
    return [
        LayerSpec(
            (config.attention(rotary[kind], window=windows.get(kind), wide_norms=True),),
            config.dense(),
        )
        for kind in config.layer_types(kinds)
    ]


FAMILIES = {"olmo3": Family(_olmo3, lambda _: _RULES, parts=(POST_NORMS, QK_NORMS))}
