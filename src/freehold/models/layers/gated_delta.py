"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024), as in Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from typing import Any, Generic

from freehold.models.backend import Array, Backend, CachePlace, ScanTensors, Weight
from freehold.models.layers.source import LayerSource
from freehold.models.spec import GatedDelta


class GatedDeltaMixer(Generic[Array, Weight]):
    """Loads `delta.*`: qkv, gate, strength, step, taps, decay, step_bias, norm, output."""

    def __init__(self, spec: GatedDelta, source: LayerSource[Array, Weight], place: CachePlace, epsilon: float):
        self._spec, self._place, self._epsilon = spec, place, epsilon
        self._backend: Backend[Array, Weight, Any] = source.backend
        self._norm = source.vector("mixer_norm.weight")
        self._qkv, self._gate = source.weight("delta.qkv.weight"), source.weight("delta.gate.weight")
        self._gates = source.weight("delta.strength.weight", "delta.step.weight")
        self._taps = source.taps("delta.taps.weight")
        self._scan = ScanTensors(source.vector("delta.decay"), source.vector("delta.step_bias"))
        self._out_norm = source.vector("delta.norm.weight")
        self._output = source.weight("delta.output.weight")

    def add(self, x: Array, batch: Any, out: Array) -> None:
        """Add the layer's output for the hidden states x [tokens, hidden_size] to out."""
        ops, spec = self._backend, self._spec
        normed = ops.norm(x, self._norm, self._epsilon)
        inner, gate = ops.linear(normed, self._qkv), ops.linear(normed, self._gate)
        inner = ops.convolve(self._place, inner, self._taps, None, True, batch)
        read = ops.delta_rule(self._place, spec, inner, ops.linear(normed, self._gates), batch, self._scan)
        gated = ops.silu_gate(read, gate, self._out_norm, spec.value_head_count, self._epsilon, norm_first=True)
        ops.linear_add(self._output, gated, out)
