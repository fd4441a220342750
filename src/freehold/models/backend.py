"""The operations from which layers are built, implemented once per kind of device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from freehold.models.spec import Activation, Attention, GatedDelta, Latent, Mamba2, Routing
from freehold.models.tensor import StoredTensor

Array = TypeVar("Array")  # the device's; float32 [tokens, features] unless stated otherwise
Weight = TypeVar("Weight")  # a packed matrix [rows, columns]
PackedArray = TypeVar("PackedArray", covariant=True)
PackedWeight = TypeVar("PackedWeight", covariant=True)
Batch = TypeVar("Batch", contravariant=True)  # the pages and positions of a step's tokens


class CachePlace(NamedTuple):
    """Where a mixer keeps its cache: the cache group, and its index among the members."""

    group: int
    member: int


Attend = Callable[[Array, Any], Array]  # qkv and a batch -> the heads' outputs


@dataclass(frozen=True)
class AttentionTensors(Generic[Array]):
    """Norms of each head's queries and keys [head_size], and attention sinks [heads], scores that take attention away
    from all tokens (Xiao et al. 2024; gpt-oss)."""

    q_norm: Array | None = None
    k_norm: Array | None = None
    sinks: Array | None = None


@dataclass(frozen=True)
class ScanTensors(Generic[Array]):
    """A recurrence's values by head: the state's decay, which is negative, the bias of time steps, and the share of the
    input added to the output."""

    decay: Array
    step_bias: Array
    skip: Array | None = None


@dataclass(frozen=True)
class ExpertWeights(Generic[Array, Weight]):
    gate_up: Weight
    down: Weight
    gate_up_bias: Array | None = None
    down_bias: Array | None = None


class Packing(Protocol[PackedArray, PackedWeight]):
    """Converts file tensors to the kernels' formats."""

    def pack(self, tensors: Sequence[StoredTensor], names: Sequence[str] = ()) -> PackedWeight:
        """Pack the tensors' rows in order into one matrix in the kernels' layout. With the tensors' `names`, adapters
        may change it; it must then be multiplied with all tokens of a batch, in order."""
        ...

    def pack_vocabulary(self, table: StoredTensor) -> PackedWeight:
        """Pack a matrix whose rows are tokens, for embedding or scoring."""
        ...

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedWeight:
        """Pack one matrix per head, for `heads_linear`."""
        ...

    def vector(self, tensors: Sequence[StoredTensor]) -> PackedArray:
        """Concatenate the tensors' values, float32 [n]."""
        ...


class RowOperations(Protocol[Array, Weight]):
    """Row-wise operations. A result depends only on its row: not on the batch, nor on how prompts are chunked."""

    def embed(self, table: Weight, tokens: Any) -> Array:
        """Look up rows of the table for tokens int32 [n] -> [n, features]."""
        ...

    def norm(self, x: Array, norm: Array, epsilon: float) -> Array:
        """Return the RMSNorm of each row."""
        ...

    def norm_columns(self, x: Array, start: int, norm: Array, epsilon: float) -> None:
        """Apply RMSNorm in place to the columns from `start` covered by `norm` [n]."""
        ...

    def linear(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        """Return x @ weight.T + bias."""
        ...

    def norm_linear(self, x: Array, norm: Array, epsilon: float, weight: Weight, bias: Array | None = None) -> Array:
        """Return norm(x) @ weight.T + bias."""
        ...

    def heads_linear(self, x: Array, weight: Weight) -> Array:
        """Multiply each head of x [tokens, heads * a] by its matrix [b, a] of `pack_heads` -> [tokens, heads * b]."""
        ...

    def linear_add(self, weight: Weight, x: Array, out: Array, bias: Array | None = None) -> None:
        """Compute out += x @ weight.T + bias in place."""
        ...

    def gated_linear_add(
        self, weight: Weight, gate_up: Array, out: Array, activation: Activation, bias: Array | None = None
    ) -> None:
        """Compute out += activation(first half, second half) @ weight.T + bias in place, for gate_up [tokens, 2 f]."""
        ...

    def zeros_like(self, x: Array) -> Array: ...

    def scale(self, x: Array, factor: Any) -> None:
        """Multiply x in place by a number, an array like x, or [features]."""
        ...

    def add(self, x: Array, other: Array) -> None:
        """Add to x in place an array like x, or [features]."""
        ...

    def soft_cap(self, x: Array, cap: float) -> None:
        """Compute x = cap * tanh(x / cap) in place."""
        ...

    def sigmoid_gate(self, x: Array, gate: Array) -> None:
        """Multiply x in place by sigmoid(gate); gate is like x, or [tokens, 1]."""
        ...

    def silu_gate(
        self, x: Array, gate: Array, norm: Array | None, group_count: int, epsilon: float, norm_first: bool
    ) -> Array:
        """Return x * silu(gate), with an RMSNorm of each of `group_count` column groups before or after. `norm` has
        weights for all columns, or one set for every group."""
        ...

    def columns(self, x: Array, start: int, stop: int) -> Array:
        """Copy these columns to a new array."""
        ...

    def join_columns(self, parts: Sequence[Array], head_count: int = 1) -> Array:
        """Concatenate the parts' columns; for several heads, within each head: [tokens, heads * features]."""
        ...

    def route(self, logits: Array, routing: Routing, correction: Array | None) -> tuple[Any, Any]:
        """Route by logits [tokens, experts] -> experts int64 [tokens, used], ascending, and their weights. `correction`
        [experts] affects which experts are chosen, not their weights."""
        ...

    def experts(
        self, x: Array, choice: tuple[Any, Any], experts: Sequence[ExpertWeights[Array, Weight]], activation: Activation
    ) -> Array:
        """Return the weighted sum of the chosen experts' outputs for each token."""
        ...


class Backend(Packing[Array, Weight], RowOperations[Array, Weight], Protocol[Array, Weight, Batch]):
    """All operations. Those across a sequence depend on its earlier tokens, not on the batch or on chunking."""

    def attention(self, place: CachePlace, attention: Attention, tensors: AttentionTensors[Array]) -> Attend[Array]:
        """Prepare a layer. The result rotates q and k of qkv [tokens, (q + k + v heads) * head_size], writes k and v to
        the cache's pages, and attends causally over each sequence's pages, within the layer's window -> [tokens, heads
        * head_size]."""
        ...

    def latent_attention(self, place: CachePlace, latent: Latent) -> Callable[[Array, Array, Any], Array]:
        """Prepare attention over latents: queries [tokens, heads * (rank + rotated)], latents [tokens, rank + rotated]
        and a batch -> [tokens, heads * rank]."""
        ...

    def convolve(self, place: CachePlace, x: Array, taps: Array, bias: Array | None, silu: bool, batch: Batch) -> Array:
        """Convolve each column causally with taps [taps, columns], the last for the newest token, then apply SiLU if
        `silu`. The state begins with the last inputs."""
        ...

    def scan(
        self, place: CachePlace, mamba: Mamba2, x: Array, steps: Array, batch: Batch, tensors: ScanTensors[Array]
    ) -> Array:
        """Run Mamba2's recurrence: x [tokens, channels] after the convolution, time steps [tokens, heads] -> [tokens,
        inner_size]."""
        ...

    def delta_rule(
        self, place: CachePlace, delta: GatedDelta, x: Array, gates: Array, batch: Batch, tensors: ScanTensors[Array]
    ) -> Array:
        """Run the gated delta rule: x [tokens, channels] after the convolution, gates [tokens, 2 * value heads], which
        are write strengths and time steps -> [tokens, value heads * value_size]."""
        ...
