"""Grouped-query attention over all tokens or a window."""

from __future__ import annotations

from typing import Any, Generic

import numpy as np

from freehold.models.backend import Array, AttentionTensors, Backend, CachePlace, Weight
from freehold.models.layers.source import LayerSource
from freehold.models.spec import Attention
from freehold.models.tensor import StoredTensor


class AttentionMixer(Generic[Array, Weight]):
    """Loads `attention.*`: q, k, v, output, q_norm, k_norm, sinks.

    Query and key norms apply to one head, or, as in OLMo (`wide_norms`), to all heads together.
    """

    def __init__(self, spec: Attention, source: LayerSource[Array, Weight], place: CachePlace, epsilon: float):
        self._spec, self._epsilon = spec, epsilon
        self._backend: Backend[Array, Weight, Any] = source.backend
        names = [f"attention.{part}" for part in "qkv"]
        self._gate: Weight | None = None
        if spec.output_gate:
            query, gate = _without_gate(source.stored("attention.q.weight"), spec.head_size)
            self._gate = self._backend.pack([gate])
            rest = [source.stored(f"{name}.weight") for name in names[1:]]
            self._qkv = self._backend.pack([query, *rest])
        else:
            self._qkv = source.weight(*(f"{name}.weight" for name in names))
        self._factors = self._of_columns(spec)
        self._bias = source.optional(*(f"{name}.bias" for name in names))
        self._output = source.weight("attention.output.weight")
        self._output_bias = source.optional("attention.output.bias")
        self._norm = source.optional("mixer_norm.weight")
        q_norm, k_norm = (source.optional(f"attention.{part}_norm.weight") for part in "qk")
        of_head = (None, None) if spec.wide_norms else (q_norm, k_norm)
        tensors = AttentionTensors(*of_head, source.optional("attention.sinks"))
        self._attend = self._backend.attention(place, spec, tensors)
        self._wide_norms = (q_norm, k_norm) if spec.wide_norms else None

    def _of_columns(self, spec: Attention) -> Array | None:
        if spec.input_multiplier == 1 and spec.key_multiplier == 1:
            return None
        queries, keys = spec.head_count * spec.head_size, spec.kv_head_count * spec.head_size
        factors = np.repeat(np.array([1, spec.key_multiplier, 1]) * spec.input_multiplier, (queries, keys, keys))
        return self._backend.vector([StoredTensor.of(factors.astype(np.float32))])

    def add(self, x: Array, batch: Any, out: Array) -> None:
        """Add the attention of the hidden states x [tokens, hidden_size] to out."""
        ops, spec = self._backend, self._spec
        gate = None
        if self._norm is None:
            qkv = ops.linear(x, self._qkv, self._bias)
        elif self._gate is None:
            qkv = ops.norm_linear(x, self._norm, self._epsilon, self._qkv, self._bias)
        else:
            normed = ops.norm(x, self._norm, self._epsilon)
            qkv, gate = ops.linear(normed, self._qkv, self._bias), ops.linear(normed, self._gate)
        if self._factors is not None:
            ops.scale(qkv, self._factors)
        if self._wide_norms is not None:
            for start, norm in zip((0, spec.head_count * spec.head_size), self._wide_norms, strict=True):
                assert norm is not None
                ops.norm_columns(qkv, start, norm, self._epsilon)
        attended = self._attend(qkv, batch)
        if gate is not None:
            ops.sigmoid_gate(attended, gate)
        ops.linear_add(self._output, attended, out, self._output_bias)


def _without_gate(stored: StoredTensor, head_size: int) -> tuple[StoredTensor, StoredTensor]:
    """Split a query projection whose heads have a gate after the query. Return queries and gates."""
    rows = np.arange(stored.rows).reshape(-1, 2, head_size)
    return stored.reorder(rows[:, 0].ravel()), stored.reorder(rows[:, 1].ravel())
