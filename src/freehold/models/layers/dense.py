"""A gated feed-forward layer (Shazeer 2020)."""

from __future__ import annotations

from typing import Any, Generic

import numpy as np

from freehold.models.backend import Array, Backend, Weight
from freehold.models.layers.source import LayerSource
from freehold.models.spec import Dense
from freehold.models.tensor import StoredTensor


class DenseFFN(Generic[Array, Weight]):
    """Loads `ffn.*`: gate, up, down."""

    def __init__(self, spec: Dense, source: LayerSource[Array, Weight], epsilon: float):
        self._spec, self._epsilon = spec, epsilon
        self._backend: Backend[Array, Weight, Any] = source.backend
        self._norm = source.optional("ffn_norm.weight")
        self._gate_up, self._bias = (
            source.weight("ffn.gate.weight", "ffn.up.weight"),
            source.optional("ffn.gate.bias", "ffn.up.bias"),
        )
        self._down, self._down_bias = source.weight("ffn.down.weight"), source.optional("ffn.down.bias")
        factors = np.repeat(np.array([spec.gate_multiplier, 1.0], np.float32), spec.size)
        self._factors = None if spec.gate_multiplier == 1 else self._backend.vector([StoredTensor.of(factors)])

    def add(self, x: Array, out: Array) -> None:
        """Add the layer's output for the hidden states x [tokens, hidden_size] to out."""
        ops = self._backend
        if self._norm is None:
            gate_up = ops.linear(x, self._gate_up, self._bias)
        else:
            gate_up = ops.norm_linear(x, self._norm, self._epsilon, self._gate_up, self._bias)
        if self._factors is not None:
            ops.scale(gate_up, self._factors)
        ops.gated_linear_add(self._down, gate_up, out, self._spec.activation, self._down_bias)
