"""A Mamba2 with random weights, shaped like its smallest published model, for timing."""

from __future__ import annotations

from typing import Any

import numpy as np

from freehold.models.loading.resolve import open_checkpoint, resolve_model
from freehold.models.spec import LayerSpec, Mamba2, ModelSpec
from freehold.models.tensor import StoredTensor

LAYERS, HIDDEN = 24, 768
MAMBA = Mamba2(head_count=24, head_size=64, state_size=128, group_count=1, taps=4)


class RandomMamba:
    """Implements `Checkpoint`, with the bundled model's tokenizer."""

    def __init__(self) -> None:
        self._bundled = open_checkpoint(resolve_model(None))
        self.path = self._bundled.path
        layers = (LayerSpec((MAMBA,), None),) * LAYERS
        vocabulary = self._bundled.spec.vocab_size
        self.spec = ModelSpec("mamba2", HIDDEN, vocabulary, 16_384, 1e-5, layers, tied_embeddings=True)
        inner, channels, heads = MAMBA.inner_size, MAMBA.channels, MAMBA.head_count
        self._shapes = {
            "embedding.weight": (vocabulary, HIDDEN),
            "mamba.input.weight": (inner + channels + heads, HIDDEN),
            "mamba.output.weight": (HIDDEN, inner),
            "mamba.taps.weight": (channels, MAMBA.taps),
            "mamba.taps.bias": (channels,),
            "mamba.decay": (heads,),
            "mamba.step_bias": (heads,),
            "mamba.skip": (heads,),
            "mamba.norm.weight": (inner,),
            "mixer_norm.weight": (HIDDEN,),
            "norm.weight": (HIDDEN,),
        }
        self._rng = np.random.default_rng(0)

    def field(self, name: str, default: Any = None) -> Any:
        return self._bundled.field(name, default)

    def has(self, name: str) -> bool:
        return self._own(name) in self._shapes

    def tensor(self, name: str) -> StoredTensor:
        """Return random weights. Matrices preserve vector lengths; states remember some hundred tokens."""
        shape = self._shapes[self._own(name)]
        values = self._rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[-1], dtype=np.float32)
        if name.endswith("decay"):
            values = -np.linspace(0.01, 1, shape[0], dtype=np.float32)
        return StoredTensor.of(values)

    def module(self, name: str) -> None:
        return None

    @staticmethod
    def _own(name: str) -> str:
        return name.split(".", 2)[2] if name.startswith("layers.") else name
