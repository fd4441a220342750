"""Quantizes float weights while loading, to formats of llama.cpp (ggml, `ggml-quants.c`)."""

from __future__ import annotations

import gguf
import numpy as np

from freehold.contract.arrays import Float32
from freehold.models.tensor import StoredTensor, TensorFormat

BLOCK, SUPER_BLOCK = 32, 256
FLOATS = frozenset({TensorFormat.F32, TensorFormat.F16, TensorFormat.BF16})
ROWS_AT_A_TIME = 1 << 22  # numbers: intermediate arrays are several times as large
_TRIED = np.linspace(-1.0, 0.5, 7, dtype=np.float32)  # step widths to try: 15 / (15 + this) of a block's range


class Quantizer:
    """Converts float matrices to `kind` (Q8_0, Q4_1 or Q4_K), and records the error.

    Q4_K has blocks of 256 columns: other matrices become Q4_1. Matrices whose columns are no multiple of 32 are
    unchanged.
    """

    def __init__(self, kind: TensorFormat):
        self._kind = kind
        self._bytes_before = self._bytes = 0
        self._squares = self._errors = 0.0

    def convert(self, tensor: StoredTensor) -> StoredTensor:
        return self._convert(tensor, self._kind)

    def convert_vocabulary(self, tensor: StoredTensor) -> StoredTensor:
        """Convert the embedding or head to eight bits, since they lose most quality at few bits."""
        return self._convert(tensor, TensorFormat.Q8_0)

    @property
    def report(self) -> str:
        """Memory, and the weights' root mean square error relative to their own."""
        if not self._squares:
            return "nothing to quantize: the model has no matrices of floats"
        error = (self._errors / self._squares) ** 0.5
        before, after = (f"{count / 1e6:,.0f} MB" for count in (self._bytes_before, self._bytes))
        return f"{after} as {self._kind} instead of {before}, error of weights {error:.2%}"

    def _convert(self, tensor: StoredTensor, kind: TensorFormat) -> StoredTensor:
        if tensor.format not in FLOATS or tensor.columns % BLOCK:
            return tensor
        if kind is TensorFormat.Q4_K and tensor.columns % SUPER_BLOCK:
            kind = TensorFormat.Q4_1
        step = max(ROWS_AT_A_TIME // tensor.columns, 1)
        parts = [self._part(tensor.reorder(np.arange(first, min(first + step, tensor.rows))), kind)
                 for first in range(0, tensor.rows, step)]  # fmt: skip
        data = np.concatenate(parts)
        self._bytes_before += tensor.data.nbytes
        self._bytes += data.nbytes
        return StoredTensor(kind, tensor.rows, tensor.columns, data)

    def _part(self, tensor: StoredTensor, kind: TensorFormat) -> np.ndarray:
        values = tensor.to_float32()
        of_format = gguf.GGMLQuantizationType[kind.value]
        data = _q4_k(values) if kind is TensorFormat.Q4_K else gguf.quantize(values, of_format)
        self._squares += float(np.square(values, dtype=np.float64).sum())
        self._errors += float(np.square(values - gguf.dequantize(data, of_format), dtype=np.float64).sum())
        return data


def _q4_k(values: Float32) -> np.ndarray:
    """Quantize values [rows, columns] -> uint8 [rows, bytes]: for each 256 columns two float16, the scales and minimums
    of eight blocks in six bits each, and 256 codes of four bits."""
    rows = len(values)
    blocks = values.reshape(-1, 8, BLOCK)
    scales, least = _scales(blocks)
    whole_scale, whole_least = (part.max(axis=1, keepdims=True) / np.float32(63) for part in (scales, least))
    heads = [part.astype(np.float16) for part in (whole_scale, whole_least)]
    six_bits = [
        np.clip(np.rint(_over(part, head.astype(np.float32))), 0, 63).astype(np.uint8)
        for part, head in zip((scales, least), heads, strict=True)
    ]
    step, offset = ((bits * head.astype(np.float32))[:, :, None] for bits, head in zip(six_bits, heads, strict=True))
    codes = np.clip(np.rint(_over(blocks + offset, step)), 0, 15).astype(np.uint8)
    pairs = codes.reshape(-1, 4, 2, BLOCK)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(blocks), -1)
    packed = [head.view(np.uint8) for head in heads] + [_twelve_bytes(*six_bits), nibbles]
    return np.concatenate(packed, axis=1).reshape(rows, -1)


def _scales(blocks: Float32) -> tuple[Float32, Float32]:
    """Fit blocks [n, 8, 32] as scale * (0 .. 15) - minimum -> both [n, 8], not negative. Try a few step widths, each
    with scale and minimum fitted to its codes, and keep the smallest error."""
    low = np.minimum(blocks.min(axis=2, keepdims=True), 0)
    span = blocks.max(axis=2, keepdims=True) - low
    best = np.full(blocks.shape[:2], np.inf, np.float32)
    scales, least = np.zeros_like(best), np.zeros_like(best)
    for more in _TRIED:
        codes = np.clip(np.rint(_over(blocks - low, span / (15 + more))), 0, 15)
        scale, minimum = _fitted(blocks, codes)
        error = np.square(blocks - (codes * scale[:, :, None] - minimum[:, :, None])).sum(axis=2)
        better = error < best
        for kept, new in ((best, error), (scales, scale), (least, minimum)):
            np.copyto(kept, new, where=better)
    return scales, least


def _fitted(blocks: Float32, codes: Float32) -> tuple[Float32, Float32]:
    """Return the non-negative scale and minimum for which scale * codes - minimum is nearest to the blocks."""
    count, total, squares = codes.shape[2], codes.sum(axis=2), np.square(codes).sum(axis=2)
    values, products = blocks.sum(axis=2), (codes * blocks).sum(axis=2)
    scale = _over(count * products - total * values, count * squares - total * total)
    minimum = (scale * total - values) / count
    through_zero = (minimum < 0) | (scale < 0)
    scale = np.where(through_zero, np.maximum(_over(products, squares), 0), scale)
    return scale, np.where(through_zero, 0, minimum)


def _over(a: Float32, b: Float32) -> Float32:
    """Return a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0)


def _twelve_bytes(scales: np.ndarray, minimums: np.ndarray) -> np.ndarray:
    """Pack six bits each, [n, 8] -> [n, 12]: bytes of the first four blocks, which also hold the upper two bits of the
    last four, then the lower four bits of those."""
    first = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minimums)]
    return np.concatenate([*first, scales[:, 4:] & 15 | minimums[:, 4:] << 4], axis=1)
