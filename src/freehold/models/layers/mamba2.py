"""Mamba2 (Dao and Gu 2024)."""

from __future__ import annotations

from typing import Any, Generic

import numpy as np

from freehold.models.backend import Array, Backend, CachePlace, ScanTensors, Weight
from freehold.models.layers.source import LayerSource
from freehold.models.spec import Mamba2
from freehold.models.tensor import StoredTensor


class Mamba2Mixer(Generic[Array, Weight]):
    """Loads `mamba.*`: input (rows of gate, x, B, C and time steps), taps, decay, step_bias, skip, norm, output."""

    def __init__(self, spec: Mamba2, source: LayerSource[Array, Weight], place: CachePlace, epsilon: float):
        self._spec, self._place, self._epsilon = spec, place, epsilon
        self._backend: Backend[Array, Weight, Any] = source.backend
        self._norm = source.vector("mixer_norm.weight")
        self._input, self._input_bias = source.weight("mamba.input.weight"), source.optional("mamba.input.bias")
        self._taps, self._taps_bias = source.taps("mamba.taps.weight"), source.optional("mamba.taps.bias")
        self._scan = ScanTensors(
            source.vector("mamba.decay"), source.vector("mamba.step_bias"), source.vector("mamba.skip")
        )
        self._multipliers = self._of_columns(spec)
        self._out_norm = source.optional("mamba.norm.weight")
        self._output, self._output_bias = source.weight("mamba.output.weight"), source.optional("mamba.output.bias")

    def _of_columns(self, spec: Mamba2) -> Array | None:
        if set(spec.multipliers) == {1.0}:
            return None
        inner, shared = spec.inner_size, spec.group_count * spec.state_size
        factors = np.repeat(spec.multipliers, (inner, inner, shared, shared, spec.head_count))
        return self._backend.vector([StoredTensor.of(factors.astype(np.float32))])

    def add(self, x: Array, batch: Any, out: Array) -> None:
        """Add the layer's output for the hidden states x [tokens, hidden_size] to out."""
        ops, spec = self._backend, self._spec
        projected = ops.norm_linear(x, self._norm, self._epsilon, self._input, self._input_bias)
        if self._multipliers is not None:
            ops.scale(projected, self._multipliers)
        end = spec.inner_size + spec.channels
        gate = ops.columns(projected, 0, spec.inner_size)
        inner = ops.columns(projected, spec.inner_size, end)
        steps = ops.columns(projected, end, end + spec.head_count)
        inner = ops.convolve(self._place, inner, self._taps, self._taps_bias, True, batch)
        scanned = ops.scan(self._place, spec, inner, steps, batch, self._scan)
        gated = ops.silu_gate(
            scanned, gate, self._out_norm, spec.group_count, self._epsilon, norm_first=spec.norm_before_gate
        )
        ops.linear_add(self._output, gated, out, self._output_bias)
