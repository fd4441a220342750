"""The operations that decoders are written in. One implementation for each kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from freehold.models.spec import DecoderSpec, StoredTensor

Array = TypeVar("Array")  # the device's; float32 [tokens, features] unless said otherwise
Weight = TypeVar("Weight")  # a packed matrix [rows, columns]
Batch = TypeVar("Batch", contravariant=True)  # where the tokens of a step go and what they see


class Backend(Protocol[Array, Weight, Batch]):
    """Results of a row depend on nothing but that row: not on the batch, not on how prompts are cut."""

    def pack(self, tensors: Sequence[StoredTensor]) -> Weight:
        """One matrix of the tensors' rows in order, in the layout the kernels want."""
        ...

    def vector(self, tensors: Sequence[StoredTensor]) -> Array:
        """The tensors' values one after the other, float32 [n]."""
        ...

    def embed(self, table: Weight, tokens: Any) -> Array:
        """Rows of the table for tokens int32 [n] -> [n, features]."""
        ...

    def norm_linear(self, x: Array, norm: Array, epsilon: float, weight: Weight, bias: Array | None = None) -> Array:
        """rms_norm(x) @ weight.T + bias"""
        ...

    def linear_add(self, weight: Weight, x: Array, residual: Array) -> None:
        """residual += x @ weight.T, in place."""
        ...

    def swiglu_linear_add(self, weight: Weight, gate_up: Array, residual: Array) -> None:
        """gate_up [tokens, 2 f]: residual += (silu(first half) * second half) @ weight.T, in place."""
        ...

    def attend(
        self,
        spec: DecoderSpec,
        layer: int,
        qkv: Array,
        batch: Batch,
        q_norm: Array | None = None,
        k_norm: Array | None = None,
    ) -> Array:
        """Rotate q and k, write k and v to the pages of the layer's cache group, attend causally over each sequence's
        pages, as far back as the layer looks -> [tokens, heads * head_size]."""
        ...
