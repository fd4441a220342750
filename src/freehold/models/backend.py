"""The operations that layers are written in. One implementation for each kind of device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from freehold.models.spec import Activation, Attention, GatedDelta, Latent, Mamba2, Routing
from freehold.models.tensor import StoredTensor

Array = TypeVar("Array")  # the device's; float32 [tokens, features] unless said otherwise
Weight = TypeVar("Weight")  # a packed matrix [rows, columns]
PackedArray = TypeVar("PackedArray", covariant=True)
PackedWeight = TypeVar("PackedWeight", covariant=True)
Batch = TypeVar("Batch", contravariant=True)  # where the tokens of a step go and what they see


class CachePlace(NamedTuple):
    """Where a mixer keeps its cache: the cache group, and the number among the group's members."""

    group: int
    member: int


Attend = Callable[[Array, Any], Array]  # qkv and a batch -> what the heads found


@dataclass(frozen=True)
class AttentionTensors(Generic[Array]):
    """Norms of each head's queries and keys [head_size], and a score for each head that takes attention away from all
    tokens (Xiao et al. 2024; gpt-oss): [heads]."""

    q_norm: Array | None = None
    k_norm: Array | None = None
    sinks: Array | None = None


@dataclass(frozen=True)
class ScanTensors(Generic[Array]):
    """Of a recurrence, by head: what the state decays by, which is negative, the bias of time steps, and how much of
    the input is added to the output."""

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
    """Tensors of a file, as the kernels want them."""

    def pack(self, tensors: Sequence[StoredTensor], names: Sequence[str] = ()) -> PackedWeight:
        """One matrix of the tensors' rows in order, in the layout the kernels want. With the tensors' `names`, adapters
        may change it; it is only ever multiplied with all tokens of a batch, in their order."""
        ...

    def pack_vocabulary(self, table: StoredTensor) -> PackedWeight:
        """A matrix whose rows are tokens, which reads them or scores them."""
        ...

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedWeight:
        """One matrix for each head, for `heads_linear`."""
        ...

    def vector(self, tensors: Sequence[StoredTensor]) -> PackedArray:
        """The tensors' values one after the other, float32 [n]."""
        ...


class RowOperations(Protocol[Array, Weight]):
    """Operations on each row by itself. Its result depends on nothing but that row: not on the batch, not on how
    prompts are cut."""

    def embed(self, table: Weight, tokens: Any) -> Array:
        """Rows of the table for tokens int32 [n] -> [n, features]."""
        ...

    def norm(self, x: Array, norm: Array, epsilon: float) -> Array:
        """RMSNorm of each row."""
        ...

    def norm_columns(self, x: Array, start: int, norm: Array, epsilon: float) -> None:
        """RMSNorm, in place, of the columns from `start` that `norm` [n] has weights for."""
        ...

    def linear(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        """x @ weight.T + bias"""
        ...

    def norm_linear(self, x: Array, norm: Array, epsilon: float, weight: Weight, bias: Array | None = None) -> Array:
        """norm(x) @ weight.T + bias"""
        ...

    def heads_linear(self, x: Array, weight: Weight) -> Array:
        """x [tokens, heads * a] -> [tokens, heads * b], each head by its own matrix [b, a] of `pack_heads`."""
        ...

    def linear_add(self, weight: Weight, x: Array, out: Array, bias: Array | None = None) -> None:
        """out += x @ weight.T + bias, in place."""
        ...

    def gated_linear_add(
        self, weight: Weight, gate_up: Array, out: Array, activation: Activation, bias: Array | None = None
    ) -> None:
        """gate_up [tokens, 2 f]: out += activation(first half, second half) @ weight.T + bias, in place."""
        ...

    def zeros_like(self, x: Array) -> Array: ...

    def scale(self, x: Array, factor: Any) -> None:
        """x *= factor, in place: a number, an array like x, or [features]."""
        ...

    def add(self, x: Array, other: Array) -> None:
        """x += other, in place: an array like x, or [features]."""
        ...

    def soft_cap(self, x: Array, cap: float) -> None:
        """x = cap * tanh(x / cap), in place."""
        ...

    def sigmoid_gate(self, x: Array, gate: Array) -> None:
        """x *= sigmoid(gate), in place; gate like x, or [tokens, 1]."""
        ...

    def silu_gate(
        self, x: Array, gate: Array, norm: Array | None, group_count: int, epsilon: float, norm_first: bool
    ) -> Array:
        """x * silu(gate), with an RMSNorm of each of `group_count` groups of columns before or after. `norm` has
        weights for all columns, or for each group the same."""
        ...

    def columns(self, x: Array, start: int, stop: int) -> Array:
        """Those columns, as an array of their own."""
        ...

    def join_columns(self, parts: Sequence[Array], head_count: int = 1) -> Array:
        """The parts' columns beside each other; for several heads, those of each head: [tokens, heads * features]."""
        ...

    def route(self, logits: Array, routing: Routing, correction: Array | None) -> tuple[Any, Any]:
        """Router logits [tokens, experts] -> experts int64 [tokens, used], ascending, and their weights. `correction`
        [experts] is added where experts are chosen, not where they are weighed."""
        ...

    def experts(
        self, x: Array, choice: tuple[Any, Any], experts: Sequence[ExpertWeights[Array, Weight]], activation: Activation
    ) -> Array:
        """The weighted sum of what the chosen of `experts` make of each token."""
        ...


class Backend(Packing[Array, Weight], RowOperations[Array, Weight], Protocol[Array, Weight, Batch]):
    """All operations. Those over the tokens of a sequence depend on what it has before them, and not on the batch or on
    how it is cut."""

    def attention(self, place: CachePlace, attention: Attention, tensors: AttentionTensors[Array]) -> Attend[Array]:
        """Prepare a layer: its function rotates q and k of qkv [tokens, (q + k + v heads) * head_size], writes k and v
        to the pages of the cache, and attends causally over each sequence's pages, as far back as the layer looks ->
        [tokens, heads * head_size]."""
        ...

    def latent_attention(self, place: CachePlace, latent: Latent) -> Callable[[Array, Array, Any], Array]:
        """The same over latents: queries [tokens, heads * (rank + rotated)], latents [tokens, rank + rotated] and a
        batch -> [tokens, heads * rank]."""
        ...

    def convolve(self, place: CachePlace, x: Array, taps: Array, bias: Array | None, silu: bool, batch: Batch) -> Array:
        """A causal convolution of each column by itself, taps [taps, columns], the last for the newest token, then SiLU
        if `silu`. The state begins with its last inputs."""
        ...

    def scan(
        self, place: CachePlace, mamba: Mamba2, x: Array, steps: Array, batch: Batch, tensors: ScanTensors[Array]
    ) -> Array:
        """The recurrence of Mamba2: x [tokens, channels] after the convolution, time steps [tokens, heads] -> [tokens,
        inner_size]."""
        ...

    def delta_rule(
        self, place: CachePlace, delta: GatedDelta, x: Array, gates: Array, batch: Batch, tensors: ScanTensors[Array]
    ) -> Array:
        """The gated delta rule: x [tokens, channels] after the convolution, gates [tokens, 2 * value heads]: strengths
        of writing and time steps -> [tokens, value heads * value_size]."""
        ...
