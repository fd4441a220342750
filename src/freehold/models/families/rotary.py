"""Rotary frequencies from configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from freehold.contract.arrays import Float32
from freehold.models.spec import Rotary


def rotary_of(rope: Mapping[str, Any], size: int, theta: float, context_length: int) -> Rotary:
    """Return the rotary embedding. `rope`: `rope_parameters` or `rope_scaling` of a config.json; `size`: rotated
    dimensions of a head; `theta`: the base if `rope` has none. Raises ValueError for an unsupported scheme."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _SCHEMES:
        raise ValueError(f"RoPE scaling '{kind}' is not supported ({', '.join(_SCHEMES)} are)")
    frequencies = base_frequencies(float(rope.get("rope_theta") or theta), size)
    changed, magnitude = _SCHEMES[kind](frequencies, {"rope_theta": theta, **rope}, context_length)
    return Rotary(tuple(changed.astype(np.float32).tolist()), magnitude)


def base_frequencies(theta: float, size: int) -> Float32:
    """Return radians per position, float32 [size / 2]."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return (1.0 / np.float32(theta) ** exponents).astype(np.float32)


def _plain(frequencies: Float32, rope: Mapping[str, Any], context_length: int) -> tuple[Float32, float]:
    return frequencies, 1.0


def _linear(frequencies: Float32, rope: Mapping[str, Any], context_length: int) -> tuple[Float32, float]:
    return frequencies / np.float32(rope["factor"]), 1.0


def _llama3(frequencies: Float32, rope: Mapping[str, Any], context_length: int) -> tuple[Float32, float]:
    """Keep short wavelengths, scale long ones, interpolate between (Llama 3; transformers,
    `_compute_llama3_parameters`)."""
    wavelength = 2 * np.pi / frequencies.astype(np.float64)
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = np.clip((old / wavelength - low) / (high - low), 0, 1)
    divisors: Float32 = (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
    return (frequencies / divisors).astype(np.float32), 1.0


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _yarn(frequencies: Float32, rope: Mapping[str, Any], context_length: int) -> tuple[Float32, float]:
    """Apply YaRN (Peng et al. 2023; transformers, `_compute_yarn_parameters`)."""
    size, old = 2 * len(frequencies), rope["original_max_position_embeddings"]
    theta, factor = float(rope["rope_theta"]), float(rope.get("factor") or context_length / old)
    turns = (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
    low, high = (size * math.log(old / (turn * 2 * math.pi)) / (2 * math.log(theta)) for turn in turns)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(size // 2, dtype=np.float32) - low) / ((high - low) or 0.001), 0, 1).astype(np.float32)
    changed = frequencies / np.float32(factor) * ramp + frequencies * (1 - ramp)
    magnitude, first, second = rope.get("attention_factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    if magnitude is None and first and second:
        magnitude = yarn_magnitude(factor, first) / yarn_magnitude(factor, second)
    return changed.astype(np.float32), yarn_magnitude(factor) if magnitude is None else float(magnitude)


def _longrope(frequencies: Float32, rope: Mapping[str, Any], context_length: int) -> tuple[Float32, float]:
    """Apply LongRoPE (Ding et al. 2024). A model with an extended context uses the long factors for all requests:
    cached KV must not depend on a sequence's final length."""
    old = rope["original_max_position_embeddings"]
    is_long = context_length > old
    divisors = np.array(rope["long_factor" if is_long else "short_factor"], np.float32)
    scale = rope.get("factor") or context_length / old
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(scale) / math.log(old)) if scale > 1 else 1.0
    return frequencies / divisors, float(magnitude)


_SCHEMES = {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
