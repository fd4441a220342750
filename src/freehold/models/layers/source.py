"""One layer's tensors, packed for a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from freehold.models.backend import Array, Backend, Weight
from freehold.models.tensor import Checkpoint, StoredTensor


@dataclass(frozen=True)
class LayerSource(Generic[Array, Weight]):
    """Names omit `layers.<index>.`. A missing tensor raises KeyError with its full name."""

    checkpoint: Checkpoint
    backend: Backend[Array, Weight, Any]
    index: int

    def _stored(self, names: tuple[str, ...]) -> list[StoredTensor]:
        return [self.checkpoint.tensor(f"layers.{self.index}.{name}") for name in names]

    def has(self, name: str) -> bool:
        return self.checkpoint.has(f"layers.{self.index}.{name}")

    def weight(self, *names: str) -> Weight:
        """Pack the rows of all tensors into one matrix, which adapters may change."""
        return self.backend.pack(self._stored(names), [f"layers.{self.index}.{name}" for name in names])

    def fixed(self, *names: str) -> Weight:
        """Pack a matrix that adapters can't change."""
        return self.backend.pack(self._stored(names))

    def vector(self, *names: str) -> Array:
        return self.backend.vector(self._stored(names))

    def optional(self, *names: str) -> Array | None:
        """Return a vector, or None if the checkpoint has none of these."""
        return self.vector(*names) if any(self.has(name) for name in names) else None

    def taps(self, name: str) -> Array:
        """Return a convolution's taps: [columns, taps] in the file -> [taps, columns], flat."""
        return self.backend.vector([StoredTensor.of(self.numbers(name).T)])

    def stored(self, name: str) -> StoredTensor:
        return self._stored((name,))[0]

    def numbers(self, name: str) -> np.ndarray:
        """Return float32 [rows, columns] on the host."""
        return self.stored(name).to_float32()
