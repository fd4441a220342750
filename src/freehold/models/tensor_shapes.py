"""A model's tensors and their shapes, from its description, and a checkpoint checked against them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from freehold.contract.errors import ModelUnavailable
from freehold.models.spec import (
    Attention,
    Dense,
    Experts,
    GatedDelta,
    Latent,
    LayerSpec,
    Mamba2,
    ModelSpec,
    ShortConv,
)
from freehold.models.tensor import Checkpoint, StoredTensor

Shape = tuple[int, int]  # rows, columns
Shapes = dict[str, Shape]


class CheckedCheckpoint:
    """Implements `Checkpoint`, checking the original's tensors. Raises ModelUnavailable for one that is missing,
    unreadable or of another shape, or a vector (a norm, a bias) with a number that is not finite. Matrices are not
    scanned."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self.path, self.spec = checkpoint.path, checkpoint.spec
        self._shapes = shapes_of(self.spec)
        self._required = re.compile(rf"layers\.\d+\.(?:{'|'.join(self.spec.parts)})" if self.spec.parts else r"(?!)")

    def field(self, name: str, default: Any = None) -> Any:
        return self._checkpoint.field(name, default)

    def module(self, name: str) -> str | None:
        return self._checkpoint.module(name)

    def has(self, name: str) -> bool:
        """Return whether a tensor of that name exists or is required."""
        return self._required.fullmatch(name) is not None or self._checkpoint.has(name)

    def tensor(self, name: str) -> StoredTensor:
        expected = self._shapes[_of_any_expert(name)]
        try:
            found = self._checkpoint.tensor(name)
        except Exception as error:  # raised by the file's library, or by a rule's change of a tensor of another shape
            reason = " ".join(map(str, error.args))
            raise ModelUnavailable(f"model: {name} can't be read as {_text(expected)}: {reason}") from error
        shape = (found.rows, found.columns)
        if shape != expected:
            raise ModelUnavailable(f"model: {self.path}: {name} is {_text(shape)}, expected {_text(expected)}")
        if found.rows == 1 and not np.isfinite(found.to_float32()).all():
            raise ModelUnavailable(f"model: {self.path}: {name} has numbers that are not finite")
        return found


def shapes_of(spec: ModelSpec) -> Shapes:
    """Return shapes by the names in `Checkpoint`. A layer's experts share one name: layers.0.experts.gate.weight."""
    vocabulary = (spec.vocab_size, spec.hidden_size)
    shapes = {"embedding.weight": vocabulary, "head.weight": vocabulary, "norm.weight": (1, spec.hidden_size)}
    for index, layer in enumerate(spec.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _of_layer(layer, spec.hidden_size).items()}
    return shapes


def _of_any_expert(name: str) -> str:
    return re.sub(r"\.experts\.\d+\.", ".experts.", name)


def _text(shape: Shape) -> str:
    return f"{shape[0]} x {shape[1]}"


def _of_layer(layer: LayerSpec, hidden: int) -> Shapes:
    norms = ("mixer_norm", "mixer_post_norm", "ffn_norm", "ffn_post_norm")
    shapes: Shapes = {f"{norm}.weight": (1, hidden) for norm in norms}
    for part in (*layer.mixers, *(() if layer.ffn is None else (layer.ffn,))):
        shapes |= _OF_PART[type(part)](part, hidden)
    return shapes


def _linear(name: str, rows: int, columns: int) -> Shapes:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (1, rows)}


def _gated(name: str, size: int, hidden: int) -> Shapes:
    gate, up = (_linear(f"{name}.{part}", size, hidden) for part in ("gate", "up"))
    return gate | up | _linear(f"{name}.down", hidden, size)


def _taps(name: str, channels: int, taps: int) -> Shapes:
    return {f"{name}.weight": (channels, taps), f"{name}.bias": (1, channels)}


def _attention(spec: Attention, hidden: int) -> Shapes:
    queries, keys = spec.head_count * spec.head_size, spec.kv_head_count * spec.head_size
    return {
        **_linear("attention.q", queries * (2 if spec.output_gate else 1), hidden),
        **_linear("attention.k", keys, hidden),
        **_linear("attention.v", keys, hidden),
        **_linear("attention.output", hidden, queries),
        "attention.q_norm.weight": (1, queries if spec.wide_norms else spec.head_size),
        "attention.k_norm.weight": (1, keys if spec.wide_norms else spec.head_size),
        "attention.sinks": (1, spec.head_count),
    }


def _latent(spec: Latent, hidden: int) -> Shapes:
    queries, query_rank = spec.head_count * (spec.plain_size + spec.rotary.size), spec.query_rank or 0
    return {
        "latent.q.weight": (queries, hidden),
        "latent.q_down.weight": (query_rank, hidden),
        "latent.q_norm.weight": (1, query_rank),
        "latent.q_up.weight": (queries, query_rank),
        "latent.kv_down.weight": (spec.rank + spec.rotary.size, hidden),
        "latent.kv_norm.weight": (1, spec.rank),
        "latent.kv_up.weight": (spec.head_count * (spec.plain_size + spec.value_size), spec.rank),
        "latent.output.weight": (hidden, spec.head_count * spec.value_size),
    }


def _short_conv(spec: ShortConv, hidden: int) -> Shapes:
    return {
        **_linear("conv.input", 3 * spec.channels, hidden),
        **_taps("conv.taps", spec.channels, spec.taps),
        **_linear("conv.output", hidden, spec.channels),
    }


def _mamba2(spec: Mamba2, hidden: int) -> Shapes:
    return {
        **_linear("mamba.input", spec.inner_size + spec.channels + spec.head_count, hidden),
        **_taps("mamba.taps", spec.channels, spec.taps),
        **dict.fromkeys(("mamba.decay", "mamba.step_bias", "mamba.skip"), (1, spec.head_count)),
        "mamba.norm.weight": (1, spec.inner_size),
        **_linear("mamba.output", hidden, spec.inner_size),
    }


def _gated_delta(spec: GatedDelta, hidden: int) -> Shapes:
    values = spec.value_head_count * spec.value_size
    return {
        "delta.qkv.weight": (spec.channels, hidden),
        "delta.gate.weight": (values, hidden),
        **dict.fromkeys(("delta.strength.weight", "delta.step.weight"), (spec.value_head_count, hidden)),
        "delta.taps.weight": (spec.channels, spec.taps),
        **dict.fromkeys(("delta.decay", "delta.step_bias"), (1, spec.value_head_count)),
        "delta.norm.weight": (1, spec.value_size),
        "delta.output.weight": (hidden, values),
    }


def _experts(spec: Experts, hidden: int) -> Shapes:
    return {
        **_linear("experts.router", spec.count, hidden),
        "experts.router.correction": (1, spec.count),
        **_gated("experts", spec.size, hidden),
        **_gated("shared", spec.shared_size, hidden),
        "shared.router.weight": (1, hidden),
    }


_OF_PART: dict[type, Any] = {
    Attention: _attention,
    Latent: _latent,
    ShortConv: _short_conv,
    Mamba2: _mamba2,
    GatedDelta: _gated_delta,
    Dense: lambda spec, hidden: _gated("ffn", spec.size, hidden),
    Experts: _experts,
}
