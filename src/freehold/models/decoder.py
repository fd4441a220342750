"""A decoder for paged caches, with the layers of a model's description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from freehold.models.backend import Array, Backend, CachePlace, Weight
from freehold.models.layers.attention import AttentionMixer
from freehold.models.layers.dense import DenseFFN
from freehold.models.layers.experts import ExpertsFFN
from freehold.models.layers.gated_delta import GatedDeltaMixer
from freehold.models.layers.latent import LatentMixer
from freehold.models.layers.mamba2 import Mamba2Mixer
from freehold.models.layers.short_conv import ShortConvMixer
from freehold.models.layers.source import LayerSource
from freehold.models.spec import (
    Attention,
    CacheLayout,
    Dense,
    Experts,
    GatedDelta,
    Latent,
    Mamba2,
    ModelSpec,
    ShortConv,
)
from freehold.models.tensor import Checkpoint
from freehold.models.tensor_shapes import CheckedCheckpoint

Batch = TypeVar("Batch")

MIXERS: dict[type, Any] = {
    Attention: AttentionMixer,
    Latent: LatentMixer,
    ShortConv: ShortConvMixer,
    Mamba2: Mamba2Mixer,
    GatedDelta: GatedDeltaMixer,
}
FFNS: dict[type, Any] = {Dense: DenseFFN, Experts: ExpertsFFN}


class _Mixer(Protocol):
    def add(self, x: Any, batch: Any, out: Any) -> None: ...


class _FFN(Protocol):
    def add(self, x: Any, out: Any) -> None: ...


@dataclass(frozen=True)
class _Layer(Generic[Array]):
    """Parts, the multipliers of their outputs, and norms of the outputs, if any."""

    mixers: list[_Mixer]
    multipliers: tuple[float, ...]
    mixer_norm: Array | None
    ffn: _FFN | None
    ffn_multiplier: float
    ffn_norm: Array | None


class Decoder(Generic[Array, Weight, Batch]):
    """Maps tokens to hidden states to logits, on a device's arrays. `layouts`: its cache groups. Raises
    ModelUnavailable if the checkpoint lacks a described tensor, or has one of another shape."""

    def __init__(self, checkpoint: Checkpoint, backend: Backend[Array, Weight, Batch], layouts: Sequence[CacheLayout]):
        checkpoint = CheckedCheckpoint(checkpoint)
        self.spec: ModelSpec = checkpoint.spec
        self._backend = backend
        places = {
            member: CachePlace(group, number)
            for group, layout in enumerate(layouts)
            for number, member in enumerate(layout.members)
        }
        self._embedding = backend.pack_vocabulary(checkpoint.tensor("embedding.weight"))
        self._layers = [self._load_layer(checkpoint, index, places) for index in range(self.spec.layer_count)]
        self._norm = backend.vector([checkpoint.tensor("norm.weight")])
        tied = self.spec.tied_embeddings
        self._head = self._embedding if tied else backend.pack_vocabulary(checkpoint.tensor("head.weight"))

    def _load_layer(
        self, checkpoint: Checkpoint, index: int, places: dict[tuple[int, int], CachePlace]
    ) -> _Layer[Array]:
        spec, epsilon = self.spec.layers[index], self.spec.norm_epsilon
        source = LayerSource(checkpoint, self._backend, index)
        return _Layer(
            mixers=[
                MIXERS[type(mixer)](mixer, source, places[index, number], epsilon)
                for number, mixer in enumerate(spec.mixers)
            ],
            multipliers=spec.mixer_multipliers,
            mixer_norm=source.optional("mixer_post_norm.weight"),
            ffn=None if spec.ffn is None else FFNS[type(spec.ffn)](spec.ffn, source, epsilon),
            ffn_multiplier=spec.ffn_multiplier,
            ffn_norm=source.optional("ffn_post_norm.weight"),
        )

    def forward(self, tokens: Any, batch: Batch) -> Array:
        """Compute tokens int32 [n] of all sequences of the batch -> hidden states [n, hidden_size]."""
        ops = self._backend
        x = ops.embed(self._embedding, tokens)
        if self.spec.embedding_multiplier != 1:
            ops.scale(x, self.spec.embedding_multiplier)
        for layer in self._layers:
            self._mix(layer, x, batch)
            self._feed_forward(layer, x)
        return x

    def _mix(self, layer: _Layer[Array], x: Array, batch: Batch) -> None:
        """Add the outputs of the layer's mixers to x. A single mixer may add to x directly."""
        if layer.mixer_norm is None and layer.multipliers == (1.0,):
            layer.mixers[0].add(x, batch, x)
            return
        answers = [self._backend.zeros_like(x) for _ in layer.mixers]
        for mixer, answer in zip(layer.mixers, answers, strict=True):
            mixer.add(x, batch, answer)
        for answer, multiplier in zip(answers, layer.multipliers, strict=True):
            self._join(x, answer, layer.mixer_norm, multiplier)

    def _feed_forward(self, layer: _Layer[Array], x: Array) -> None:
        if layer.ffn is None:
            return
        if layer.ffn_norm is None and layer.ffn_multiplier == 1:
            layer.ffn.add(x, x)
            return
        answer = self._backend.zeros_like(x)
        layer.ffn.add(x, answer)
        self._join(x, answer, layer.ffn_norm, layer.ffn_multiplier)

    def _join(self, x: Array, answer: Array, norm: Array | None, multiplier: float) -> None:
        ops = self._backend
        if norm is not None:
            ops.norm_columns(answer, 0, norm, self.spec.norm_epsilon)
        if multiplier != 1:
            ops.scale(answer, multiplier)
        ops.add(x, answer)

    def final(self, hidden: Array) -> Array:
        """Return the hidden states after the last norm, [n, hidden_size]."""
        return self._backend.norm(hidden, self._norm, self.spec.norm_epsilon)

    def logits(self, hidden: Array) -> Array:
        """Map hidden states [n, hidden_size] to logits [n, vocab_size]."""
        ops, spec = self._backend, self.spec
        logits = ops.norm_linear(hidden, self._norm, spec.norm_epsilon, self._head)
        if spec.logit_multiplier != 1:
            ops.scale(logits, spec.logit_multiplier)
        if spec.logit_cap:
            ops.soft_cap(logits, spec.logit_cap)
        return logits
