"""The operations of decoders on the CPU, over NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from freehold.contract.arrays import Float32, Int32, Int64
from freehold.engine.cpu import recurrence, row_operations, rows
from freehold.engine.cpu.attention import attending, joining, rotating
from freehold.engine.cpu.batch import CpuBatch
from freehold.engine.cpu.caches import GroupCache
from freehold.engine.cpu.heads import HeadMatrices, multiply_heads
from freehold.engine.cpu.huge_pages import Arena
from freehold.engine.cpu.integer_linear import IntegerMatrix, can_pack, has_four_bits, has_whole_blocks
from freehold.engine.cpu.isa import ISAS, Isa, choose, of_attention, of_integers
from freehold.engine.cpu.linear import PackedMatrix, pack
from freehold.engine.cpu.low_rank import AdaptableShape, AdaptedMatrix, AdaptedTokens, Factors, compile_kernels
from freehold.engine.cpu.onto import NOTHING, OUTPUT, Onto, onto_bias
from freehold.engine.cpu.page_bytes import PageBytes
from freehold.engine.cpu.pointwise import CLAMPED, GEGLU, NO_NORM, NORM, PLAINLY, SWIGLU, Preparation
from freehold.engine.cpu.program import Count, Now, Operations
from freehold.engine.cpu.recorder import Forward, NotRecorded, Recorder, RowRecorder
from freehold.engine.cpu.row_scaled import RowScaledMatrix, has_few_bits
from freehold.engine.cpu.state_batch import StateBatch
from freehold.models.backend import Attend, AttentionTensors, CachePlace, ExpertWeights, ScanTensors
from freehold.models.quantize import Quantizer
from freehold.models.spec import Activation, Attention, GatedDelta, KVCache, Latent, Mamba2, Rotary, Routing
from freehold.models.tensor import AdapterMatrices, StoredTensor

_Stored = PackedMatrix | IntegerMatrix | RowScaledMatrix
Matrix = _Stored | AdaptedMatrix
_ACTIVATIONS = {"silu": SWIGLU, "gelu": GEGLU, "clamped": CLAMPED}
_SCORES = {"softmax": rows.SOFTMAX, "sigmoid": rows.SIGMOID, "chosen": rows.CHOSEN}


class _Looks(NamedTuple):
    """Attention parameters. `rotary_start`: where the rotated numbers of a head start. `lookback` 0 is all."""

    rotary: Rotary | None
    rotary_start: int
    lookback: int
    scale: float
    cap: float


class CpuBackend:
    """Implements `freehold.models.backend.Backend` for float32 arrays, with each group's caches. `compute` is the type
    that inputs of few-bit weights are rounded to: int16, int8, or none (float32). `adapts` allows adapters. `quantizer`
    converts float weights."""

    def __init__(
        self,
        caches: Sequence[GroupCache],
        epsilon: float,
        position_count: int,
        compute: str = "float32",
        adapts: bool = False,
        isa: Isa | None = None,
        quantizer: Quantizer | None = None,
    ):
        self.caches = caches
        self._epsilon, self._position_count, self._compute = epsilon, position_count, compute
        self._now, self._arena = Now(), Arena()
        self._operations: Operations = self._now
        self._largest_heads = [(0, 0)] * len(caches)  # of each group: the most heads, and the largest value size
        chosen = ISAS[choose()] if isa is None else isa
        self._isa, self._attention_isa = of_integers(chosen), of_attention(chosen)
        self._quantizer = quantizer
        self._adapts, self._adapted_tokens = adapts, AdaptedTokens()
        self._adaptable: dict[str, AdaptableShape] = {}  # by tensor name
        self._rotary: dict[Rotary | None, tuple[Float32, Float32]] = {None: (NO_NORM, NO_NORM)}

    def batch(
        self, tables: Sequence[Int32], rows: Int64, starts: Int64, counts: Int64, proposed: Int64
    ) -> list[CpuBatch | StateBatch]:
        return [
            StateBatch.of(table, cache, rows, starts, counts, proposed)
            if cache.layout.is_state
            else CpuBatch.of(table, cache.page_size, rows, starts, counts, not cache.layout.has_windows)
            for table, cache in zip(tables, self.caches, strict=True)
        ]

    def settle(self, batch: Sequence[CpuBatch | StateBatch], written: Int64) -> None:
        for cache, of in zip(self.caches, batch, strict=True):
            if isinstance(of, StateBatch):
                of.settle(cache, written)

    def page_bytes(self) -> Sequence[PageBytes]:
        return [PageBytes(cache) for cache in self.caches]

    # Loading

    def pack(self, tensors: Sequence[StoredTensor], names: Sequence[str] = ()) -> Matrix:
        matrix = self._pack(tensors)
        if not names or not self._adapts:
            return matrix
        shape = AdaptableShape(tuple(names), tuple(tensor.rows for tensor in tensors), matrix.columns)
        self._adaptable.update(dict.fromkeys(names, shape))
        return AdaptedMatrix(matrix, shape, self._adapted_tokens)

    def pack_vocabulary(self, table: StoredTensor) -> Matrix:
        return self._packed([table if self._quantizer is None else self._quantizer.convert_vocabulary(table)])

    def _pack(self, tensors: Sequence[StoredTensor]) -> _Stored:
        return self._packed(tensors if self._quantizer is None else [self._quantizer.convert(one) for one in tensors])

    def _packed(self, tensors: Sequence[StoredTensor]) -> _Stored:
        return self._arena.keep_arrays(self._made(tensors))

    def _made(self, tensors: Sequence[StoredTensor]) -> _Stored:
        if self._compute == "float32" or not can_pack(tensors):
            return pack(tensors)
        if has_few_bits(tensors) and (self._compute == "int16" or not has_four_bits(tensors)):
            return RowScaledMatrix.pack(tensors, self._isa)
        return IntegerMatrix.pack(tensors, self._isa) if has_whole_blocks(tensors) else pack(tensors)

    def pack_heads(self, heads: Sequence[StoredTensor]) -> HeadMatrices:
        return HeadMatrices.pack([head.to_float32() for head in heads])

    def vector(self, tensors: Sequence[StoredTensor]) -> Float32:
        return np.concatenate([tensor.to_float32().ravel() for tensor in tensors])

    # Adapters

    @property
    def adaptable(self) -> dict[str, tuple[int, int]]:
        return {
            name: (shape.row_counts[shape.names.index(name)], shape.columns) for name, shape in self._adaptable.items()
        }

    def pack_adapter(self, matrices: Mapping[str, AdapterMatrices]) -> Factors:
        compile_kernels()
        changed = {self._adaptable[name].names: self._adaptable[name] for name in matrices}
        return {names: shape.pack(matrices) for names, shape in changed.items()}

    # Recording

    def recorder(self, forward: Forward) -> Callable[[Int32, Sequence[Any]], Float32]:
        record = Recorder(self, forward)
        return lambda tokens, batch: record(tokens, batch, self._largest_heads)

    def row_recorder(self, compute: Callable[[Float32], Float32]) -> Callable[[Float32], Float32]:
        return RowRecorder(self, compute)

    @contextmanager
    def recording(self, program: Operations) -> Iterator[None]:
        """Send operations to a program. Raises NotRecorded for computations that are no operation."""
        self._operations = program
        try:
            yield
        finally:
            self._operations = self._now

    def _at_once(self) -> None:
        """Raise NotRecorded while recording: the following computation is no operation."""
        if self._operations is not self._now:
            raise NotRecorded

    @property
    def is_adapting(self) -> bool:
        return bool(self._adapted_tokens.parts)

    @contextmanager
    def adapting(self, parts: Sequence[tuple[Factors, Int64]]) -> Iterator[None]:
        self._adapted_tokens.parts = parts
        try:
            yield
        finally:
            self._adapted_tokens.parts = ()

    # Row by row

    def embed(self, table: Matrix, tokens: Int32) -> Float32:
        return table.gather(self._operations, tokens)

    def norm(self, x: Float32, norm: Float32, epsilon: float) -> Float32:
        return row_operations.prepare(self._operations, x, x.shape[1], Preparation(NORM, norm, epsilon))

    def norm_columns(self, x: Float32, start: int, norm: Float32, epsilon: float) -> None:
        row_operations.norm_columns(self._operations, x, start, norm, epsilon)

    def linear(self, x: Float32, weight: Matrix, bias: Float32 | None = None) -> Float32:
        return self._product(weight, x, PLAINLY, NOTHING, bias)

    def norm_linear(
        self, x: Float32, norm: Float32, epsilon: float, weight: Matrix, bias: Float32 | None = None
    ) -> Float32:
        return self._product(weight, x, Preparation(NORM, norm, epsilon), onto_bias(bias), None)

    def linear_add(self, weight: Matrix, x: Float32, out: Float32, bias: Float32 | None = None) -> None:
        weight.multiply(self._operations, x, out, PLAINLY, OUTPUT)
        self._add_bias(out, bias)

    def gated_linear_add(
        self, weight: Matrix, gate_up: Float32, out: Float32, activation: Activation, bias: Float32 | None = None
    ) -> None:
        parameters = NO_NORM if not activation.limit else np.array([activation.alpha, activation.limit], np.float32)
        preparation = Preparation(_ACTIVATIONS[activation.kind], parameters)
        weight.multiply(self._operations, gate_up, out, preparation, OUTPUT)
        self._add_bias(out, bias)

    def _product(
        self, weight: Matrix, x: Float32, preparation: Preparation, onto: Onto, bias: Float32 | None
    ) -> Float32:
        out = self._operations.room((len(x), weight.rows))
        weight.multiply(self._operations, x, out, preparation, onto)
        self._add_bias(out, bias)
        return out

    def _add_bias(self, out: Float32, bias: Float32 | None) -> None:
        if bias is not None:
            row_operations.add(self._operations, out, bias)

    def zeros_like(self, x: Float32) -> Float32:
        return row_operations.zeros(self._operations, x.shape)

    def scale(self, x: Float32, factor: Any) -> None:
        row_operations.scale(self._operations, x, factor)

    def add(self, x: Float32, other: Float32) -> None:
        row_operations.add(self._operations, x, other)

    # Computed immediately

    def heads_linear(self, x: Float32, weight: HeadMatrices) -> Float32:
        self._at_once()
        return multiply_heads(x, weight)

    def soft_cap(self, x: Float32, cap: float) -> None:
        self._at_once()
        rows.soft_cap(x, np.float32(cap))

    def sigmoid_gate(self, x: Float32, gate: Float32) -> None:
        self._at_once()
        rows.sigmoid_gate(x, gate)

    def silu_gate(
        self, x: Float32, gate: Float32, norm: Float32 | None, group_count: int, epsilon: float, norm_first: bool
    ) -> Float32:
        self._at_once()
        out, norm = np.empty_like(x), NO_NORM if norm is None else norm
        rows.silu_gate(x, gate, norm, group_count, np.float32(epsilon), norm_first, out)
        return out

    def columns(self, x: Float32, start: int, stop: int) -> Float32:
        self._at_once()
        return np.ascontiguousarray(x[:, start:stop])

    def join_columns(self, parts: Sequence[Float32], head_count: int = 1) -> Float32:
        self._at_once()
        count = len(parts[0])
        return np.concatenate([part.reshape(count, head_count, -1) for part in parts], axis=2).reshape(count, -1)

    def route(self, logits: Float32, routing: Routing, correction: Float32 | None) -> tuple[Int64, Float32]:
        self._at_once()
        shape = (len(logits), routing.used)
        experts, weights = np.empty(shape, np.int64), np.empty(shape, np.float32)
        rows.route(
            logits, NO_NORM if correction is None else correction, _SCORES[routing.scores], routing.normalize,
            np.float32(routing.factor), routing.group_count, routing.groups_used, routing.group_by_two,
            experts, weights,
        )  # fmt: skip
        return experts, weights

    def experts(
        self,
        x: Float32,
        choice: tuple[Int64, Float32],
        experts: Sequence[ExpertWeights[Float32, Matrix]],
        activation: Activation,
    ) -> Float32:
        """Add experts in ascending order, so that a token's sum has one order in any batch."""
        self._at_once()
        chosen, weights = choice
        out = np.zeros_like(x)
        for number in np.unique(chosen).tolist():
            token, place = np.nonzero(chosen == number)
            expert = experts[number]
            gate_up = self.linear(x[token], expert.gate_up, expert.gate_up_bias)
            answer = np.zeros((len(token), x.shape[1]), np.float32)
            self.gated_linear_add(expert.down, gate_up, answer, activation, expert.down_bias)
            out[token] += weights[token, place][:, None] * answer
        return out

    # Over the tokens of a sequence

    def attention(self, place: CachePlace, attention: Attention, tensors: AttentionTensors[Float32]) -> Attend[Float32]:
        scale = attention.head_size**-0.5 if attention.scale is None else attention.scale
        lookback = 0 if attention.window is None else attention.window - 1
        looks = _Looks(attention.rotary, 0, lookback, scale, attention.soft_cap)
        return self._prepare(place, attention.head_count, attention.cache, looks, tensors)

    def latent_attention(self, place: CachePlace, latent: Latent) -> Callable[[Float32, Float32, Any], Float32]:
        looks = _Looks(latent.rotary, latent.rank, 0, latent.scale, 0.0)
        attend = self._prepare(place, latent.head_count, latent.cache, looks, AttentionTensors())

        def run(queries: Float32, latents: Float32, batch: Any) -> Float32:
            self._at_once()
            return attend(np.concatenate([queries, latents], axis=1), batch)

        return run

    def _prepare(
        self, place: CachePlace, heads: int, cache: KVCache, looks: _Looks, tensors: AttentionTensors[Float32]
    ) -> Attend[Float32]:
        """Prepare the operations' constant arguments once."""
        group, number = self.caches[place.group], place.group
        kv, (cos, sin) = group.kv[place.member], self._rotary_tables(looks.rotary)
        pairs = 0 if looks.rotary is None else looks.rotary.size // 2
        q_norm, k_norm, sinks = (
            NO_NORM if one is None else one for one in (tensors.q_norm, tensors.k_norm, tensors.sinks)
        )
        fixed = (
            cos, sin, pairs, looks.rotary_start, q_norm, len(q_norm), k_norm, len(k_norm), self._epsilon,
            kv.keys, kv.values, kv.key_scales, kv.value_scales, len(kv.key_scales), kv.tile_step, kv.scale_step,
            group.page_size, looks.lookback, looks.scale, looks.cap, sinks, len(sinks),
            heads, cache.head_count, cache.key_size, cache.value_size, cache.is_latent,
        )  # fmt: skip
        largest = self._largest_heads[number]
        self._largest_heads[number] = max(largest[0], heads), max(largest[1], cache.value_size)
        kind = kv.keys.dtype.type
        # Kernels that `first_start` compiles in parallel come last.
        attend, join = attending(kind, self._attention_isa), joining(kind, self._attention_isa)
        rotate = rotating(kind)

        def run(qkv: Float32, batch: Sequence[Any]) -> Float32:
            of, operations = batch[number], self._operations
            of.make_room(heads, cache.value_size)
            queries = operations.room((len(qkv), heads * cache.key_size))
            out = operations.room((len(qkv), heads * cache.value_size))
            arguments = *fixed, qkv, queries, out, of.record
            operations.add(rotate, len(qkv), *arguments)
            operations.add(attend, Count(of.record["parts"], cache.head_count), *arguments)
            operations.add(join, Count(of.record["joins"], cache.head_count), *arguments)
            return out

        return run

    def _rotary_tables(self, rotary: Rotary | None) -> tuple[Float32, Float32]:
        """Return cos and sin of every position's angles, flat [positions, pairs]."""
        if rotary not in self._rotary:
            frequencies = np.array(rotary.frequencies if rotary else (), np.float32)
            angles = np.arange(self._position_count, dtype=np.float32)[:, None] * frequencies[None, :]
            magnitude = np.float32(rotary.magnitude if rotary else 1)
            self._rotary[rotary] = ((np.cos(angles) * magnitude).ravel(), (np.sin(angles) * magnitude).ravel())
        return self._rotary[rotary]

    def convolve(
        self, place: CachePlace, x: Float32, taps: Float32, bias: Float32 | None, silu: bool, batch: Sequence[Any]
    ) -> Float32:
        self._at_once()
        out, of = np.empty_like(x), batch[place.group]
        convolution = recurrence.Convolution(taps, NO_NORM if bias is None else bias, silu)
        recurrence.convolve(x, convolution, self.caches[place.group].states[place.member], of.visits, out)
        return out

    def scan(
        self,
        place: CachePlace,
        mamba: Mamba2,
        x: Float32,
        steps: Float32,
        batch: Sequence[Any],
        tensors: ScanTensors[Float32],
    ) -> Float32:
        self._at_once()
        out, of = np.empty((len(x), mamba.inner_size), np.float32), batch[place.group]
        low, high = mamba.time_step_limit
        assert tensors.skip is not None
        scan = recurrence.Scan(
            mamba.head_count, mamba.head_size, mamba.state_size, mamba.group_count, tensors.decay, tensors.step_bias,
            tensors.skip, np.float32(low), np.float32(high), mamba.cache.convolution,
        )  # fmt: skip
        recurrence.scan(x, steps, scan, self.caches[place.group].states[place.member], of.visits, out)
        return out

    def delta_rule(
        self,
        place: CachePlace,
        delta: GatedDelta,
        x: Float32,
        gates: Float32,
        batch: Sequence[Any],
        tensors: ScanTensors[Float32],
    ) -> Float32:
        self._at_once()
        out, of = np.empty((len(x), delta.value_head_count * delta.value_size), np.float32), batch[place.group]
        rule = recurrence.Delta(
            delta.key_head_count, delta.value_head_count, delta.tiled_heads, delta.key_size, delta.value_size,
            tensors.decay, tensors.step_bias, delta.cache.convolution,
        )  # fmt: skip
        recurrence.delta_rule(x, gates, rule, self.caches[place.group].states[place.member], of.visits, out)
        return out
