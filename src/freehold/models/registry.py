"""The supported model families."""

from __future__ import annotations

from freehold.models.families import deepseek, gemma, gpt_oss, lfm2, llama, mamba, olmo, qwen_delta
from freehold.models.families.family import Family

# By `model_type` in config.json.
FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **gemma.FAMILIES,
    **olmo.FAMILIES,
    **gpt_oss.FAMILIES,
    **deepseek.FAMILIES,
    **mamba.FAMILIES,
    **lfm2.FAMILIES,
    **qwen_delta.FAMILIES,
}


def family_of(name: str, where: object) -> Family:
    """Return a family. Raises ValueError for an unsupported one; `where` the name was found."""
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{where}: model type '{name}' is not supported ({known} are)")
    return FAMILIES[name]
