"""A mixture of experts (Shazeer et al. 2017): a router chooses a few feed-forward layers per token."""

from __future__ import annotations

from typing import Any, Generic

from freehold.models.backend import Array, Backend, ExpertWeights, Weight
from freehold.models.layers.source import LayerSource
from freehold.models.spec import Experts


class ExpertsFFN(Generic[Array, Weight]):
    """Loads `experts.router`, `experts.<number>.*` and `shared.*`: gate, up, down; shared.router, if there is one."""

    def __init__(self, spec: Experts, source: LayerSource[Array, Weight], epsilon: float):
        self._spec, self._epsilon = spec, epsilon
        self._backend: Backend[Array, Weight, Any] = source.backend
        self._norm = source.vector("ffn_norm.weight")
        self._router, self._bias = source.fixed("experts.router.weight"), source.optional("experts.router.bias")
        self._correction = source.vector("experts.router.correction") if spec.routing.scores == "sigmoid" else None
        self._experts = [self._load(source, f"experts.{number}") for number in range(spec.count)]
        self._shared = self._load(source, "shared") if spec.shared_size else None
        has_gate = spec.shared_size > 0 and source.has("shared.router.weight")
        self._shared_router = source.fixed("shared.router.weight") if has_gate else None

    @staticmethod
    def _load(source: LayerSource[Array, Weight], name: str) -> ExpertWeights[Array, Weight]:
        return ExpertWeights(
            source.fixed(f"{name}.gate.weight", f"{name}.up.weight"),
            source.fixed(f"{name}.down.weight"),
            source.optional(f"{name}.gate.bias", f"{name}.up.bias"),
            source.optional(f"{name}.down.bias"),
        )

    def add(self, x: Array, out: Array) -> None:
        """Add the experts' output for the hidden states x [tokens, hidden_size] to out."""
        ops, activation = self._backend, self._spec.activation
        normed = ops.norm(x, self._norm, self._epsilon)
        choice = ops.route(ops.linear(normed, self._router, self._bias), self._spec.routing, self._correction)
        ops.add(out, ops.experts(normed, choice, self._experts, activation))
        if self._shared is None:
            return
        answer = ops.zeros_like(out)
        ops.gated_linear_add(self._shared.down, ops.linear(normed, self._shared.gate_up), answer, activation)
        if self._shared_router is not None:
            ops.sigmoid_gate(answer, ops.linear(normed, self._shared_router))
        ops.add(out, answer)
