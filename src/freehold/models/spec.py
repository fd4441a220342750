"""The shape of a decoder, and tensors as they come from a file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from freehold.arrays import Float32


@dataclass(frozen=True)
class DecoderSpec:
    """A Llama-family decoder. `qk_norm` is Qwen3's, `qkv_bias` Qwen2's."""

    architecture: str
    layer_count: int
    hidden_size: int
    head_count: int
    kv_head_count: int
    head_size: int
    ffn_size: int
    vocab_size: int
    context_length: int
    rope_theta: float
    norm_epsilon: float
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    rope_divisors: Float32 | None = None  # [head_size / 2], scaled RoPE (Llama 3)
    windows: tuple[int | None, ...] = ()  # of each layer: tokens that it looks at, its own included. Empty: all

    def lookback_of(self, layer: int) -> int | None:
        """How many tokens before its own a position of a layer looks at; None is all of them."""
        window = self.windows[layer] if self.windows else None
        return None if window is None else window - 1

    def layers_by_lookback(self) -> dict[int | None, tuple[int, ...]]:
        """The layers of each cache group, those that look at everything first."""
        lookbacks = [self.lookback_of(layer) for layer in range(self.layer_count)]
        kinds = sorted(set(lookbacks), key=lambda lookback: (lookback is not None, lookback or 0))
        return {kind: tuple(layer for layer, one in enumerate(lookbacks) if one == kind) for kind in kinds}

    def layers_of_groups(self, group_count: int) -> list[tuple[int, ...]]:
        """The layers of each cache group. If there is one group, it has all layers, however far they look back."""
        return [tuple(range(self.layer_count))] if group_count == 1 else list(self.layers_by_lookback().values())

    def kv_bytes_per_token(self, kind: str, layer_count: int | None = None) -> int:
        """Of so many layers, or all. `kind`: float32, bfloat16, or int8, which has a float32 scale for each key and
        value of a head."""
        vector = {"float32": 4 * self.head_size, "bfloat16": 2 * self.head_size, "int8": self.head_size + 4}[kind]
        return 2 * (self.layer_count if layer_count is None else layer_count) * self.kv_head_count * vector


class TensorFormat(StrEnum):
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q8_0 = "Q8_0"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the format of its file: `data` uint8 [rows, bytes of a row]; vectors have one row."""

    format: TensorFormat
    rows: int
    columns: int
    data: np.ndarray

    def reorder(self, order: np.ndarray) -> StoredTensor:
        """The same tensor with its rows in another order."""
        return StoredTensor(self.format, self.rows, self.columns, self.data[order])

    def to_float32(self) -> Float32:
        """[rows, columns], for small tensors and tests."""
        raw = np.ascontiguousarray(self.data)
        if self.format is TensorFormat.F32:
            return raw.view(np.float32).reshape(self.rows, self.columns)
        if self.format is TensorFormat.F16:
            return raw.view(np.float16).astype(np.float32).reshape(self.rows, self.columns)
        if self.format is TensorFormat.BF16:
            wide = raw.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.rows, self.columns)
        import gguf

        kind = gguf.GGMLQuantizationType[self.format.value]
        return gguf.dequantize(raw, kind).reshape(self.rows, self.columns)


class Checkpoint(Protocol):
    """A model on disk. Tensor names are those of Hugging Face's Llama, without `model.`."""

    path: Path

    @property
    def spec(self) -> DecoderSpec: ...

    def field(self, name: str, default: Any = None) -> Any:
        """A value of the file's metadata (GGUF) or of config.json."""
        ...

    def tensor(self, name: str) -> StoredTensor:
        """Raises KeyError with the name if the checkpoint lacks it."""
        ...
