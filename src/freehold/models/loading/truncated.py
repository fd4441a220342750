"""The first layers of a model, as a draft model without a second file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from freehold.models.tensor import Checkpoint, StoredTensor


class TruncatedCheckpoint:
    """Implements `Checkpoint` with only the first `layer_count` layers of the original."""

    def __init__(self, whole: Checkpoint, layer_count: int):
        if not 1 <= layer_count <= whole.spec.layer_count:
            raise ValueError(f"speculative_draft_layers must be 1 to {whole.spec.layer_count}, not {layer_count}")
        self._whole = whole
        self.path = whole.path
        self.spec = replace(whole.spec, layers=whole.spec.layers[:layer_count])

    def field(self, name: str, default: Any = None) -> Any:
        return self._whole.field(name, default)

    def has(self, name: str) -> bool:
        return self._whole.has(name)

    def tensor(self, name: str) -> StoredTensor:
        return self._whole.tensor(name)

    def module(self, name: str) -> str | None:
        return self._whole.module(name)
