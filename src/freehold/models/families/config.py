"""A config.json, with the fields that all families share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freehold.models.families.rotary import rotary_of
from freehold.models.spec import Activation, Attention, Dense, Rotary

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}


def architecture_of(values: Mapping[str, Any]) -> str:
    """Return the decoder's `model_type`."""
    return str({**values, **values.get("text_config", {})}.get("model_type"))


class HfConfig:
    """Raises ValueError with the path for a missing or unsupported field. Multimodal models have the decoder's fields
    in `text_config`. `defaults`: the family's values for missing fields."""

    def __init__(self, path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None):
        self.path = path
        self.values: dict[str, Any] = {**(defaults or {}), **values, **values.get("text_config", {})}
        self.architecture = architecture_of(values)
        if self.values.get("quantization_config"):
            kind = self.values["quantization_config"].get("quant_method", "unknown")
            raise ValueError(f"{path}: weights quantized with '{kind}' are not supported (a GGUF file may be)")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field's value, or the default if it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    def int(self, name: str) -> int:
        value = self.get(name)
        if value is None:
            raise ValueError(f"{self.path}: config.json lacks {name}")
        return int(value)

    @property
    def layer_count(self) -> int:
        return self.int("num_hidden_layers")

    @property
    def context_length(self) -> int:
        return int(self.get("max_position_embeddings", 2048))

    def window(self) -> int | None:
        """Return `sliding_window`; None if it covers the context."""
        window = self.get("sliding_window")
        if not window or window >= self.context_length:
            return None
        if window < 2:
            raise ValueError(f"{self.path}: a sliding_window of {window} is not supported")
        return int(window)

    def layer_types(self, default: list[str]) -> list[str]:
        """Return "full_attention", "sliding_attention", "linear_attention" or "conv" for each layer."""
        names = {"attention": "full_attention", "mamba": "linear_attention"}
        kinds: list[str] = self.get("layer_types", default)
        return [names.get(kind, kind) for kind in kinds]

    def rotary(self, size: int, layer_type: str | None = None, theta: float = 10000.0) -> Rotary:
        """Return the rotary embedding of all layers, or of one type if types differ."""
        rope = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if layer_type is not None and layer_type in rope:
            rope = rope[layer_type] or {}
        if any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(f"{self.path}: rotary embeddings by layer type are not supported for {self.architecture}")
        return rotary_of(rope, size, float(self.get("rope_theta", theta)), self.context_length)

    def rotated_share(self) -> float:
        """Return the share of a head that is rotated."""
        rope = self.get("rope_parameters") or {}
        return float(rope.get("partial_rotary_factor") or self.get("partial_rotary_factor", 1.0))

    @property
    def head_size(self) -> int:
        return int(self.get("head_dim") or self.int("hidden_size") // self.int("num_attention_heads"))

    def attention(self, rotary: Rotary | None, **fields: Any) -> Attention:
        """Return the attention spec; `fields` override or extend the usual ones."""
        heads = self.int("num_attention_heads")
        usual = {
            "head_count": heads,
            "kv_head_count": int(self.get("num_key_value_heads", heads)),
            "head_size": self.head_size,
            "rotary": rotary,
        }
        return Attention(**{**usual, **fields})

    def activation(self) -> Activation:
        name = self.get("hidden_activation") or self.get("hidden_act", "silu")
        if name not in _ACTIVATIONS:
            raise ValueError(f"{self.path}: the activation '{name}' is not supported ({', '.join(_ACTIVATIONS)} are)")
        return Activation(_ACTIVATIONS[name])

    def dense(self, size: int | None = None, gate_multiplier: float = 1.0) -> Dense:
        return Dense(size or self.int("intermediate_size"), self.activation(), gate_multiplier)
