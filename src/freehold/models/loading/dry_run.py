"""Whether a checkpoint has every tensor of its description, found out as it is loaded, but keeping none."""

from __future__ import annotations

from typing import Any

from freehold.models.decoder import Decoder
from freehold.models.tensor import Checkpoint


class _Discarding:
    """What a decoder asks of a backend while it is loaded: all is taken, nothing is packed."""

    def pack(self, tensors: Any, names: Any = ()) -> None: ...

    def pack_vocabulary(self, table: Any) -> None: ...

    def pack_heads(self, heads: Any) -> None: ...

    def vector(self, tensors: Any) -> None: ...

    def attention(self, place: Any, attention: Any, tensors: Any) -> None: ...

    def latent_attention(self, place: Any, latent: Any) -> None: ...


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raises ModelUnavailable for the first tensor that is missing or wrong. The tensors of a GGUF file are mapped, so
    few of their bytes are read; safetensors are read."""
    backend: Any = _Discarding()
    Decoder(checkpoint, backend, checkpoint.spec.cache_layouts())
