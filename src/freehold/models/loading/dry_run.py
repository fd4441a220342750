"""Checks that a checkpoint has every described tensor, by loading it without keeping any."""

from __future__ import annotations

from typing import Any

from freehold.models.decoder import Decoder
from freehold.models.tensor import Checkpoint


class _Discarding:
    """A backend for loading a decoder: it accepts everything and packs nothing."""

    def pack(self, tensors: Any, names: Any = ()) -> None: ...

    def pack_vocabulary(self, table: Any) -> None: ...

    def pack_heads(self, heads: Any) -> None: ...

    def vector(self, tensors: Any) -> None: ...

    def attention(self, place: Any, attention: Any, tensors: Any) -> None: ...

    def latent_attention(self, place: Any, latent: Any) -> None: ...


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise ModelUnavailable for the first missing or wrong tensor. GGUF files are mapped, so few bytes are read;
    safetensors are read."""
    backend: Any = _Discarding()
    Decoder(checkpoint, backend, checkpoint.spec.cache_layouts())
