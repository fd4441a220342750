"""Quantized tensors of llama.cpp as integers with scales (ggml, `ggml-common.h`; gguf-py, `quants.py`).

A weight is scale * code + minimum, where 16 columns share both. This is exact: scales are products of a float16 and a
few bits, which float32 represents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from gguf import quants

from freehold.contract.arrays import Float32
from freehold.models.tensor import StoredTensor, TensorFormat

SHARE = 16
NUMBERS_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class Codes:
    """codes int8 [rows, columns], scales [rows, columns / 16], minimums likewise; None if all are 0. `codes_of` sets
    limits float32 [rows, 2]: the smallest and the largest code of a row's format."""

    codes: np.ndarray
    scales: Float32
    minimums: Float32 | None = None
    limits: Float32 = field(default_factory=lambda: np.zeros((0, 2), np.float32))


def _halves(raw: np.ndarray, at: int) -> Float32:
    """Return the float16 at byte `at` of each block [rows, blocks, bytes] -> float32 [rows, blocks, 1]."""
    return np.ascontiguousarray(raw[:, :, at : at + 2]).view(np.float16).astype(np.float32)


def _numbers(packed: np.ndarray, group: int, bits: int) -> np.ndarray:
    """Unpack numbers of `bits` bits from groups of bytes [rows, blocks, n] -> [rows, blocks, 8 n / bits]. In each
    group, the lowest bits of all bytes come first, then the next ones."""
    rows, count = packed.shape[:2]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    found = packed.reshape(rows, count, -1, 1, group) >> shifts[:, None] & np.uint8((1 << bits) - 1)
    return found.reshape(rows, count, -1)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack [rows, blocks, 16] bytes -> [rows, blocks, 32] codes, low halves first."""
    return _numbers(packed, 16, 4)


def _fifth_bits(raw: np.ndarray, at: int) -> np.ndarray:
    """Unpack the fifth bits of 32 codes from four bytes -> [rows, blocks, 32], 0 or 16."""
    bits = np.unpackbits(np.ascontiguousarray(raw[:, :, at : at + 4]), axis=2, bitorder="little")
    return bits << 4


def _of_blocks(codes: np.ndarray, scales: Float32, minimums: Float32 | None = None) -> Codes:
    """Convert [rows, blocks, columns of a block] with a scale and minimum per 32 columns or fewer."""
    rows, shares = len(codes), codes.shape[1] * codes.shape[2] // SHARE

    def spread(values: Float32) -> Float32:
        flat = values.reshape(rows, -1)
        return np.ascontiguousarray(np.repeat(flat, shares // flat.shape[1], axis=1))

    least = None if minimums is None else spread(minimums)
    return Codes(codes.reshape(rows, -1).astype(np.int8), spread(scales), least)


def _q4_0(raw: np.ndarray) -> Codes:
    """Convert codes -8 .. 7 to 0 .. 15 with a minimum: exact, since 8 is a power of two."""
    scales = _halves(raw, 0)
    return _of_blocks(_nibbles(raw[:, :, 2:]), scales, scales * np.float32(-8))


def _q4_1(raw: np.ndarray) -> Codes:
    return _of_blocks(_nibbles(raw[:, :, 4:]), _halves(raw, 0), _halves(raw, 2))


def _q5_0(raw: np.ndarray) -> Codes:
    return _of_blocks((_nibbles(raw[:, :, 6:]) | _fifth_bits(raw, 2)).astype(np.int8) - 16, _halves(raw, 0))


def _q5_1(raw: np.ndarray) -> Codes:
    return _of_blocks(_nibbles(raw[:, :, 8:]) | _fifth_bits(raw, 4), _halves(raw, 0), _halves(raw, 2))


def _q8_0(raw: np.ndarray) -> Codes:
    return _of_blocks(np.ascontiguousarray(raw[:, :, 2:]).view(np.int8), _halves(raw, 0))


def _iq4_nl(raw: np.ndarray) -> Codes:
    values = np.array(quants.IQ4_NL.kvalues, np.int8)
    return _of_blocks(values[_nibbles(raw[:, :, 2:])], _halves(raw, 0))


def _mxfp4(raw: np.ndarray) -> Codes:
    """Convert a power of two and half numbers: codes are twice the values. The smallest two powers are subnormal."""
    exponents = raw[:, :, :1].astype(np.int32)
    values = np.array(quants.MXFP4.kvalues, np.int8)
    return _of_blocks(values[_nibbles(raw[:, :, 1:])], np.ldexp(np.float32(1), exponents - 128).astype(np.float32))


def _of_eight(raw: np.ndarray) -> tuple[Float32, Float32]:
    """Return scales and minimums of the eight blocks of a super-block, Q4_K and Q5_K -> [rows, super-blocks, 8]
    each."""
    rows, count = raw.shape[:2]
    packed = np.ascontiguousarray(raw[:, :, 4:16]).reshape(-1, 12)
    scales, minimums = (part.reshape(rows, count, 8).astype(np.float32) for part in quants.Q4_K.get_scale_min(packed))
    return _halves(raw, 0) * scales, -(_halves(raw, 2) * minimums)


def _q2_k(raw: np.ndarray) -> Codes:
    """Convert blocks in which one byte per 16 columns holds a scale and a minimum of four bits."""
    pairs, codes = raw[:, :, :16], _numbers(raw[:, :, 16:80], 32, 2)
    scales, minimums = (part.astype(np.float32) for part in (pairs & 15, pairs >> 4))
    return _of_blocks(codes, _halves(raw, 80) * scales, -(_halves(raw, 82) * minimums))


def _q3_k(raw: np.ndarray) -> Codes:
    """Convert codes of two bits, a third bit whose absence is -4, and scales of six bits in two places."""
    third, low = _numbers(raw[:, :, :32], 32, 1), _numbers(raw[:, :, 32:96], 32, 2)
    codes = low.astype(np.int8) - 4 * (third ^ 1).astype(np.int8)
    scales = _numbers(raw[:, :, 96:104], 8, 4) | _numbers(raw[:, :, 104:108], 4, 2) << 4
    return _of_blocks(codes, _halves(raw, 108) * (scales.astype(np.float32) - 32))


def _q4_k(raw: np.ndarray) -> Codes:
    return _of_blocks(_numbers(raw[:, :, 16:], 32, 4), *_of_eight(raw))


def _q5_k(raw: np.ndarray) -> Codes:
    fifth = _numbers(raw[:, :, 16:48], 32, 1) << 4
    return _of_blocks(_numbers(raw[:, :, 48:], 32, 4) | fifth, *_of_eight(raw))


def _q6_k(raw: np.ndarray) -> Codes:
    codes = _numbers(raw[:, :, :128], 64, 4) | _numbers(raw[:, :, 128:192], 32, 2) << 4
    scales = np.ascontiguousarray(raw[:, :, 192:208]).view(np.int8).astype(np.float32)
    return _of_blocks(codes.astype(np.int8) - 32, _halves(raw, 208) * scales)


class _Reader(NamedTuple):
    """A format: bytes of a block, the function that reads blocks, the smallest and the largest code."""

    size: int
    read: Callable[[np.ndarray], Codes]
    least: int
    most: int


_READERS: dict[TensorFormat, _Reader] = {
    TensorFormat.Q4_0: _Reader(18, _q4_0, 0, 15),
    TensorFormat.Q4_1: _Reader(20, _q4_1, 0, 15),
    TensorFormat.Q5_0: _Reader(22, _q5_0, -16, 15),
    TensorFormat.Q5_1: _Reader(24, _q5_1, 0, 31),
    TensorFormat.Q8_0: _Reader(34, _q8_0, -128, 127),
    TensorFormat.IQ4_NL: _Reader(18, _iq4_nl, -127, 113),
    TensorFormat.MXFP4: _Reader(17, _mxfp4, -12, 12),
    TensorFormat.Q2_K: _Reader(84, _q2_k, 0, 3),
    TensorFormat.Q3_K: _Reader(110, _q3_k, -4, 3),
    TensorFormat.Q4_K: _Reader(144, _q4_k, 0, 15),
    TensorFormat.Q5_K: _Reader(176, _q5_k, 0, 31),
    TensorFormat.Q6_K: _Reader(210, _q6_k, -32, 31),
}
CODED = frozenset(_READERS)
WITH_MINIMUMS = frozenset({
    TensorFormat.Q4_0, TensorFormat.Q4_1, TensorFormat.Q5_1, TensorFormat.Q2_K, TensorFormat.Q4_K, TensorFormat.Q5_K,
})  # fmt: skip
WITH_FINE_MINIMUMS = frozenset({TensorFormat.Q2_K})  # one minimum per 16 columns, not per 32


def range_of(kind: TensorFormat) -> tuple[int, int]:
    """Return the smallest and the largest code of one of the formats CODED."""
    return _READERS[kind].least, _READERS[kind].most


def codes_of(tensor: StoredTensor) -> Codes:
    """Return the integers of a tensor in one of the formats CODED."""
    reader = _READERS[tensor.format]
    codes = reader.read(np.ascontiguousarray(tensor.data).reshape(tensor.rows, -1, reader.size))
    return replace(codes, limits=np.tile(np.array([reader.least, reader.most], np.float32), (tensor.rows, 1)))


def packed(
    tensors: Sequence[StoredTensor], group: int, pack: Callable[[Codes], tuple[np.ndarray, ...]]
) -> tuple[np.ndarray, ...]:
    """Pack the rows of all tensors, padded with zero rows to a whole group: flat arrays in row order. Packs some groups
    at a time, since intermediate arrays are several times as large."""
    rows = sum(tensor.rows for tensor in tensors)
    rows, at, whole = rows + -rows % group, 0, None
    for codes in _groups_of(tensors, group):
        count = len(codes.codes)
        arrays = pack(codes)
        if whole is None:
            whole = tuple(np.empty(len(array) // count * rows, array.dtype) for array in arrays)
        for array, to in zip(arrays, whole, strict=True):
            each = len(array) // count
            to[at * each : (at + count) * each] = array
        at += count
    assert whole is not None, "some rows"
    return whole


def _groups_of(tensors: Sequence[StoredTensor], group: int) -> Iterator[Codes]:
    """Yield whole groups of rows, about NUMBERS_AT_A_TIME numbers each."""
    most = max(NUMBERS_AT_A_TIME // tensors[0].columns // group, 1) * group
    parts: list[Codes] = []
    count = 0
    for tensor in tensors:
        first = 0
        while first < tensor.rows:
            stop = min(first + most - count, tensor.rows)
            parts.append(codes_of(tensor.between(first, stop)))
            tensor.leave_memory()
            count, first = count + stop - first, stop
            if count == most:
                yield _joined(parts, 0)
                parts, count = [], 0
    if parts:
        yield _joined(parts, -count % group)


def _joined(parts: Sequence[Codes], more_rows: int) -> Codes:
    """Concatenate parts and append zero rows. If one has minimums, all do."""
    rows = sum(len(part.codes) for part in parts) + more_rows
    columns = parts[0].codes.shape[1]
    codes, scales = np.zeros((rows, columns), np.int8), np.zeros((rows, columns // SHARE), np.float32)
    has_minimums = any(part.minimums is not None for part in parts)
    minimums = np.zeros_like(scales) if has_minimums else None
    limits = np.zeros((rows, 2), np.float32)
    at = 0
    for part in parts:
        end = at + len(part.codes)
        codes[at:end], scales[at:end], limits[at:end] = part.codes, part.scales, part.limits
        if minimums is not None and part.minimums is not None:
            minimums[at:end] = part.minimums
        at = end
    return Codes(codes, scales, minimums, limits)
