"""LFM2's gated short convolution."""

from __future__ import annotations

from typing import Any, Generic

from freehold.models.backend import Array, Backend, CachePlace, Weight
from freehold.models.layers.source import LayerSource
from freehold.models.spec import ShortConv


class ShortConvMixer(Generic[Array, Weight]):
    """Loads `conv.*`: input (rows of B, C and x), taps, output."""

    def __init__(self, spec: ShortConv, source: LayerSource[Array, Weight], place: CachePlace, epsilon: float):
        self._spec, self._place, self._epsilon = spec, place, epsilon
        self._backend: Backend[Array, Weight, Any] = source.backend
        self._norm = source.vector("mixer_norm.weight")
        self._input, self._input_bias = source.weight("conv.input.weight"), source.optional("conv.input.bias")
        self._taps, self._taps_bias = source.taps("conv.taps.weight"), source.optional("conv.taps.bias")
        self._output, self._output_bias = source.weight("conv.output.weight"), source.optional("conv.output.bias")

    def add(self, x: Array, batch: Any, out: Array) -> None:
        """Add C * convolution(B * x) of the hidden states x [tokens, hidden_size] to out."""
        ops, size = self._backend, self._spec.channels
        projected = ops.norm_linear(x, self._norm, self._epsilon, self._input, self._input_bias)
        before, after, inner = (ops.columns(projected, part * size, (part + 1) * size) for part in range(3))
        ops.scale(inner, before)
        mixed = ops.convolve(self._place, inner, self._taps, self._taps_bias, False, batch)
        ops.scale(mixed, after)
        ops.linear_add(self._output, mixed, out, self._output_bias)
