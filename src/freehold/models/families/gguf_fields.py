"""A GGUF file's metadata, and the layer parts that most families read alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from freehold.contract.arrays import Float32
from freehold.models.families.rotary import rotary_of
from freehold.models.spec import Activation, Attention, Dense, Experts, Rotary, Routing

SILU = Activation()


@dataclass(frozen=True)
class GgufFields:
    """A file's metadata, its tensors' shapes, fastest dimension first, and divisors of rotary frequencies, if any.
    Raises ValueError with the file's name for a missing field."""

    path: Path
    values: Mapping[str, Any]
    shapes: dict[str, tuple[int, ...]]
    rope_divisors: Float32 | None = None

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of the architecture."""
        return self.values.get(f"{self.architecture}.{name}", default)

    def int(self, name: str) -> int:
        value = self.get(name)
        if value is None:
            raise ValueError(f"{self.path.name} lacks {self.architecture}.{name}")
        return int(value)

    def each(self, name: str) -> list[int]:
        """Return a number for each layer; the file has a list or one for all."""
        value = self.get(name)
        count = self.int("block_count")
        return [int(one) for one in value] if isinstance(value, list) else [int(value or 0)] * count

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the file. Raises ValueError."""
        tokens = self.values.get("tokenizer.ggml.tokens")
        return self.int("vocab_size") if tokens is None else len(tokens)

    @property
    def layers(self) -> range:
        """All layers except trailing ones that only predict further tokens."""
        return range(self.int("block_count") - int(self.get("nextn_predict_layers", 0)))

    def has(self, tensor: str, layer: int) -> bool:
        return f"blk.{layer}.{tensor}" in self.shapes

    @property
    def head_count(self) -> int:
        return max(self.each("attention.head_count"))

    @property
    def head_size(self) -> int:
        return int(self.get("attention.key_length") or self.int("embedding_length") // self.head_count)

    @property
    def context_length(self) -> int:
        return int(self.get("context_length", 2048))

    def rotary(self, size: int | None = None, theta: float | None = None, is_scaled: bool = True) -> Rotary:
        """Return the rotary embedding. `theta` overrides the file's. Some models don't scale windows for long
        contexts."""
        size = size or int(self.get("rope.dimension_count") or self.head_size)
        base = theta or float(self.get("rope.freq_base", 10_000.0))
        kind = self.get("rope.scaling.type", "none") if is_scaled else "none"
        rope: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
        if kind != "none":
            rope["factor"] = self.get("rope.scaling.factor", 1.0)
            rope["original_max_position_embeddings"] = self.get("rope.scaling.original_context_length")
        rotary = rotary_of(rope, size, base, self.context_length)
        if self.rope_divisors is None or not is_scaled:
            return rotary
        if len(self.rope_divisors) != len(rotary.frequencies):
            problem = f"has {len(self.rope_divisors)} values, expected {len(rotary.frequencies)}"
            raise ValueError(f"{self.path.name}: rope_freqs.weight {problem}")
        divided = np.array(rotary.frequencies, np.float32) / self.rope_divisors
        return replace(rotary, frequencies=tuple(divided.tolist()))

    def window(self) -> int | None:
        window = int(self.get("attention.sliding_window", 0))
        return window if 0 < window < self.context_length else None

    def attention(self, rotary: Rotary | None, layer: int = 0, **fields: Any) -> Attention:
        heads = self.each("attention.head_count")[layer] or self.head_count
        kv = self.each("attention.head_count_kv")[layer] or heads
        return Attention(**{"head_count": heads, "kv_head_count": kv, "head_size": self.head_size, "rotary": rotary,
                            **fields})  # fmt: skip

    def dense(self, layer: int = 0, kind: str = "silu") -> Dense:
        return Dense(self.each("feed_forward_length")[layer], Activation(kind))

    def experts(self, routing: Routing, activation: Activation = SILU) -> Experts:
        size = self.int("expert_feed_forward_length")
        shared = int(self.get("expert_shared_feed_forward_length") or size * int(self.get("expert_shared_count", 0)))
        return Experts(self.int("expert_count"), size, routing, activation, shared)
