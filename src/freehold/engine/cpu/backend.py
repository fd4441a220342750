"""The operations of decoders on the CPU, over NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freehold.arrays import Float32, Int32
from freehold.engine.cpu.attention import attend
from freehold.engine.cpu.batch import CpuBatch
from freehold.engine.cpu.integer_linear import IntegerMatrix, can_pack
from freehold.engine.cpu.linear import PackedMatrix, pack
from freehold.engine.cpu.pointwise import NO_NORM, NORM, SWIGLU
from freehold.models.spec import DecoderSpec, StoredTensor

LANES = 16
Matrix = PackedMatrix | IntegerMatrix


class CpuKV:
    """The KV of all pages of a cache group: for each of its layers keys [tiles, kv_heads, head_size, 16] and values
    [tiles, kv_heads, 16, head_size], flat; a tile is 16 slots. Memory is touched only when written.

    `kind`: float32, bfloat16 (kept as uint16), or int8 with a float32 scale for each position and head:
    [tiles, kv_heads, 16], flat, empty for the others.
    """

    def __init__(
        self, spec: DecoderSpec, page_count: int, page_size: int, kind: str = "float32", layer_count: int | None = None
    ):
        tiles = -(-(page_count + 1) * page_size // LANES)
        positions = tiles * LANES * spec.kv_head_count
        dtype = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}[kind]
        scales = positions if kind == "int8" else 0
        layers = range(spec.layer_count if layer_count is None else layer_count)
        self.page_size = page_size
        self.keys = [np.zeros(positions * spec.head_size, dtype) for _ in layers]
        self.values = [np.zeros(positions * spec.head_size, dtype) for _ in layers]
        self.key_scales = [np.zeros(scales, np.float32) for _ in layers]
        self.value_scales = [np.zeros(scales, np.float32) for _ in layers]


class CpuBackend:
    """Implements `freehold.models.backend.Backend` for float32 arrays, with the KV of each cache group. `compute` says
    what inputs are rounded to for products with weights that are stored in a few bits: int16, int8, or nothing
    (float32)."""

    def __init__(self, spec: DecoderSpec, kv: Sequence[CpuKV], position_count: int, compute: str = "float32"):
        self.kv = kv
        self._places = {  # of each layer: its cache group, and its number among the group's layers
            layer: (group, at)
            for group, layers in enumerate(spec.layers_of_groups(len(kv)))
            for at, layer in enumerate(layers)
        }
        self._compute = compute
        self._cos, self._sin = rotary_tables(spec, position_count)

    def pack(self, tensors: Sequence[StoredTensor]) -> Matrix:
        if self._compute != "float32" and can_pack(tensors):
            data = np.concatenate([tensor.data for tensor in tensors])
            return IntegerMatrix.pack(tensors[0].format, data, len(data), tensors[0].columns, self._compute)
        return pack(tensors)

    def vector(self, tensors: Sequence[StoredTensor]) -> Float32:
        return np.concatenate([tensor.to_float32().ravel() for tensor in tensors])

    def embed(self, table: Matrix, tokens: Int32) -> Float32:
        return table.gather(tokens)

    def norm_linear(
        self, x: Float32, norm: Float32, epsilon: float, weight: Matrix, bias: Float32 | None = None
    ) -> Float32:
        out = np.zeros((len(x), weight.rows), np.float32)
        if bias is not None:
            out += bias
        weight.multiply_add(x, out, NORM, norm, epsilon)
        return out

    def linear_add(self, weight: Matrix, x: Float32, residual: Float32) -> None:
        weight.multiply_add(x, residual)

    def swiglu_linear_add(self, weight: Matrix, gate_up: Float32, residual: Float32) -> None:
        weight.multiply_add(gate_up, residual, SWIGLU)

    def attend(
        self,
        spec: DecoderSpec,
        layer: int,
        qkv: Float32,
        batch: Sequence[CpuBatch],
        q_norm: Float32 | None = None,
        k_norm: Float32 | None = None,
    ) -> Float32:
        out = np.empty((len(qkv), spec.head_count * spec.head_size), np.float32)
        group, at = self._places[layer]
        kv, of = self.kv[group], batch[group]
        attend(
            qkv.ravel(), of.positions, of.slots, self._cos, self._sin, NO_NORM if q_norm is None else q_norm,
            NO_NORM if k_norm is None else k_norm, np.float32(spec.norm_epsilon),
            kv.keys[at], kv.values[at], kv.key_scales[at], kv.value_scales[at],
            of.tables, kv.page_size, spec.lookback_of(layer) or 0, of.item_members, of.item_shared,
            of.member_rows, of.member_tokens, of.member_counts, of.member_positions,
            spec.head_count, spec.kv_head_count, spec.head_size, out.ravel(),
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
