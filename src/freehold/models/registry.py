"""Which decoder computes which architecture."""

from __future__ import annotations

from typing import Any, Protocol

from freehold.models.backend import Backend
from freehold.models.llama import LlamaDecoder
from freehold.models.spec import Checkpoint, DecoderSpec


class Decoder(Protocol):
    """A model: tokens to hidden states to logits, on the arrays of its device."""

    spec: DecoderSpec

    def __init__(self, checkpoint: Checkpoint, backend: Backend[Any, Any, Any]): ...

    def forward(self, tokens: Any, batch: Any) -> Any:
        """tokens int32 [n] of all sequences of the batch -> hidden states [n, hidden_size]."""
        ...

    def logits(self, hidden: Any) -> Any:
        """[n, hidden_size] -> [n, vocab_size]"""
        ...


# By the name in config.json (`model_type`) or in a GGUF file (`general.architecture`).
DECODERS: dict[str, type[Decoder]] = {
    "llama": LlamaDecoder,
    "mistral": LlamaDecoder,
    "qwen2": LlamaDecoder,
    "qwen3": LlamaDecoder,
}


def check_architecture(name: str, where: object) -> None:
    """Raises ValueError for an architecture that nobody computes; `where` it was found."""
    if name not in DECODERS:
        known = ", ".join(DECODERS)
        raise ValueError(f"{where}: model type '{name}' is not supported ({known} are)")


def make_decoder(checkpoint: Checkpoint, backend: Backend[Any, Any, Any]) -> Decoder:
    """The model of a checkpoint. Raises ValueError."""
    check_architecture(checkpoint.spec.architecture, checkpoint.path)
    return DECODERS[checkpoint.spec.architecture](checkpoint, backend)
