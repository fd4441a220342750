"""The operations of decoders on the CPU, over NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freehold.arrays import Float32, Int32
from freehold.engine.cpu import pointwise
from freehold.engine.cpu.attention import paged_attention
from freehold.engine.cpu.batch import CpuBatch
from freehold.engine.cpu.integer_linear import IntegerMatrix, can_pack
from freehold.engine.cpu.linear import PackedMatrix, pack
from freehold.models.spec import DecoderSpec, StoredTensor

LANES = 16
Matrix = PackedMatrix | IntegerMatrix
_NONE = np.zeros(0, np.float32)


class CpuKV:
    """The KV of all pages: for each layer keys [tiles, kv_heads, head_size, 16] and values
    [tiles, kv_heads, 16, head_size], flat; a tile is 16 slots. Memory is touched only when written."""

    def __init__(self, spec: DecoderSpec, page_count: int, page_size: int):
        tiles = -(-(page_count + 1) * page_size // LANES)
        size = tiles * LANES * spec.kv_head_count * spec.head_size
        self.page_size = page_size
        self.keys = [np.zeros(size, np.float32) for _ in range(spec.layer_count)]
        self.values = [np.zeros(size, np.float32) for _ in range(spec.layer_count)]


class CpuBackend:
    """Implements `freehold.models.backend.Backend` for float32 arrays. `compute` says what products are made
    of: float32, or int8 for weights that are stored in a few bits."""

    def __init__(self, spec: DecoderSpec, kv: CpuKV, position_count: int, compute: str = "float32"):
        self.kv = kv
        self._compute = compute
        self._cos, self._sin = rotary_tables(spec, position_count)

    def pack(self, tensors: Sequence[StoredTensor]) -> Matrix:
        if self._compute == "int8" and can_pack(tensors):
            data = np.concatenate([tensor.data for tensor in tensors])
            return IntegerMatrix.pack(tensors[0].format, data, len(data), tensors[0].columns)
        return pack(tensors)

    def vector(self, tensors: Sequence[StoredTensor]) -> Float32:
        return np.concatenate([tensor.to_float32().ravel() for tensor in tensors])

    def embed(self, table: Matrix, tokens: Int32) -> Float32:
        return table.gather(tokens)

    def linear(self, weight: Matrix, x: Float32, bias: Float32 | None = None) -> Float32:
        out = np.zeros((len(x), weight.rows), np.float32)
        if bias is not None:
            out += bias
        weight.multiply_add(x, out)
        return out

    def linear_add(self, weight: Matrix, x: Float32, residual: Float32) -> None:
        weight.multiply_add(x, residual)

    def rms_norm(self, x: Float32, weight: Float32, epsilon: float) -> Float32:
        out = np.empty_like(x)
        pointwise.rms_norm(x.ravel(), weight, np.float32(epsilon), x.shape[1], out.ravel())
        return out

    def swiglu(self, gate_up: Float32) -> Float32:
        count, width = gate_up.shape
        out = np.empty((count, width // 2), np.float32)
        pointwise.swiglu(gate_up.ravel(), width // 2, out.ravel())
        return out

    def attend(
        self,
        spec: DecoderSpec,
        layer: int,
        qkv: Float32,
        batch: CpuBatch,
        q_norm: Float32 | None = None,
        k_norm: Float32 | None = None,
    ) -> Float32:
        width = spec.head_count * spec.head_size
        q = np.empty((len(qkv), width), np.float32)
        out = np.empty((len(qkv), width), np.float32)
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        pointwise.rotate_and_write(
            qkv.ravel(), batch.positions, batch.slots, self._cos, self._sin, spec.head_count,
            spec.kv_head_count, spec.head_size, _NONE if q_norm is None else q_norm,
            _NONE if k_norm is None else k_norm, np.float32(spec.norm_epsilon), q.ravel(), keys, values,
        )  # fmt: skip
        paged_attention(
            q.ravel(), keys, values, batch.tables, self.kv.page_size, batch.item_members,
            batch.item_shared, batch.member_rows, batch.member_tokens, batch.member_counts,
            batch.member_positions, spec.head_count, spec.kv_head_count, spec.head_size,
            np.float32(spec.head_size**-0.5), out.ravel(),
        )  # fmt: skip
        return out


def rotary_tables(spec: DecoderSpec, position_count: int) -> tuple[Float32, Float32]:
    """cos and sin of every position's angles, flat [positions, head_size / 2]."""
    exponents = np.arange(0, spec.head_size, 2, dtype=np.float32) / np.float32(spec.head_size)
    frequencies = (1.0 / np.float32(spec.rope_theta) ** exponents).astype(np.float32)
    if spec.rope_divisors is not None:
        frequencies = frequencies / spec.rope_divisors
    angles = np.arange(position_count, dtype=np.float32)[:, None] * frequencies[None, :]
    return np.cos(angles).ravel(), np.sin(angles).ravel()
