"""How the integers of quantized weights lie in memory: in few bits, in the order in which kernels read them.

A panel has as many rows as the instruction set has lanes. Its block of 32 columns takes 4 x bits x lanes bytes, which
depends on the form of the codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numba import njit

from freehold.engine.cpu.codes import BLOCK, Codes
from freehold.models.tensor import TensorFormat


# Compiled code is made for the type. `parts` of a block have a scale each.
class Nibbles(NamedTuple):
    """Codes of 0 to 15 for inputs of 8 bits, [4, lanes, 4] bytes: byte (j, lane, i) has columns 4 j + i (low half) and
    16 + 4 j + i. The inputs of all other forms have 16 bits."""

    bits: int = 4
    parts: int = 1


class FourBits(NamedTuple):
    """Words of four nibbles, [4, lanes, 2]: nibble k of word (j, lane, i) has column 8 j + 2 k + i."""

    bits: int = 4
    parts: int = 2


class FiveBits(NamedTuple):
    """The lower four bits likewise, behind them the fifth ones, [lanes, 2] words: bit p of word (lane, i) belongs to
    column 2 p + i."""

    bits: int = 5
    parts: int = 1


class SixBits(NamedTuple):
    """The lower four bits likewise, behind them the upper two, [2, lanes, 2] words: bits 2 p and 2 p + 1 of word
    (v, lane, i) belong to column 16 v + 2 p + i."""

    bits: int = 6
    parts: int = 2


class Bytes(NamedTuple):
    """Signed bytes [16, lanes, 2]: byte (j, lane, i) has column 2 j + i."""

    bits: int = 8
    parts: int = 1


class FineBytes(NamedTuple):
    """The same with two scales."""

    bits: int = 8
    parts: int = 2


Form = Nibbles | FourBits | FiveBits | SixBits | Bytes | FineBytes

NIBBLE_LOADS = 4  # of a block of `Nibbles`
FOUR_BITS = frozenset({TensorFormat.Q4_0, TensorFormat.Q4_1, TensorFormat.Q4_K})
_FINE = frozenset({TensorFormat.Q3_K, TensorFormat.Q6_K})  # one scale for 16 columns
_RANGES = {  # of codes
    **dict.fromkeys(FOUR_BITS, (0, 15)),
    TensorFormat.Q3_K: (-4, 3),
    TensorFormat.Q5_0: (-16, 15),
    TensorFormat.Q5_1: (0, 31),
    TensorFormat.Q5_K: (0, 31),
    TensorFormat.Q6_K: (-32, 31),
}
_BYTES = (-128, 127)


def form_of(formats: Iterable[TensorFormat]) -> tuple[Form, int]:
    """For one matrix of tensors in these formats: the form with the fewest bits, and what is added to codes so that
    none is negative; 0 for bytes, which are signed."""
    kinds = frozenset(formats)
    if kinds <= FOUR_BITS:
        return Nibbles(), 0
    ranges = [_RANGES.get(kind, _BYTES) for kind in kinds]
    least, most = min(low for low, _ in ranges), max(high for _, high in ranges)
    bits, parts = (most - least).bit_length(), 2 if kinds & _FINE else 1
    forms: tuple[Form, ...] = (FourBits(), FiveBits(), SixBits(), Bytes(), FineBytes())
    form = next(one for one in forms if one.bits >= bits and one.parts >= parts)
    return form, 0 if form.bits == 8 else -least


class Order(NamedTuple):
    """The order in which a matrix is read: panel by panel, block by block."""

    lanes: int
    blocks: int

    def of_codes(self, codes: np.ndarray, steps: int, beside: int) -> np.ndarray:
        """[rows, columns of bytes] -> [panels, blocks, steps, lanes, beside], flat."""
        split = codes.reshape(-1, self.lanes, self.blocks, steps, beside)
        return np.ascontiguousarray(split.transpose(0, 2, 3, 1, 4)).ravel()

    def of_numbers(self, values: np.ndarray, as_halves: bool = False) -> np.ndarray:
        """[rows, blocks x n] -> [panels, blocks, n, lanes], flat: as they are, or the bits of float16."""
        split = values.reshape(-1, self.lanes, self.blocks, values.shape[1] // self.blocks).transpose(0, 2, 3, 1)
        if as_halves:
            return np.ascontiguousarray(split, np.float16).view(np.uint16).ravel()
        return np.ascontiguousarray(split).ravel()


def nibbles(codes: Codes) -> np.ndarray:
    """Codes of four bits, uint8 [rows, blocks, 16]: byte i of a block has its columns i and 16 + i."""
    split = codes.codes.view(np.uint8).reshape(len(codes.codes), -1, BLOCK)
    return split[:, :, :16] | split[:, :, 16:] << 4


def pack_codes(codes: Codes, form: Form, offset: int, order: Order) -> np.ndarray:
    """The bytes of all panels, uint8."""
    if isinstance(form, Nibbles):
        return order.of_codes(nibbles(codes), 4, 4)
    if form.bits == 8:
        return order.of_codes(codes.codes.view(np.uint8), 16, 2)
    # Without sign, and [panels, blocks, pairs of columns, lanes x 2].
    values = order.of_codes(codes.codes.view(np.uint8) + np.uint8(offset), 16, 2)
    values = values.reshape(-1, order.blocks, 16, 2 * order.lanes)
    parts = [_words(values & np.uint8(15), 4)]
    if form.bits > 4:
        parts.append(_words(values >> 4, form.bits - 4))
    return np.concatenate([part.reshape(*values.shape[:2], -1) for part in parts], axis=2).ravel()


def _words(values: np.ndarray, bits: int) -> np.ndarray:
    """Of each of the words side by side, numbers of a few bits [..., 16, words] -> their bytes [..., n, words, 2]: as
    many numbers as fit in each word, the lowest bits first."""
    in_byte = 8 // bits
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    split = values.reshape(*values.shape[:2], 16 // (2 * in_byte), 2, in_byte, values.shape[3])
    return np.ascontiguousarray(np.bitwise_or.reduce(split << shifts, axis=4).swapaxes(3, 4))


@njit(inline="always")
def code_at(codes, bits, is_nibbles, number, lanes, lane, column):
    """The code of a column in block `number` of all panels' blocks, before the offset is taken from it."""
    at = number * 4 * bits * lanes
    if is_nibbles:
        byte = codes[at + (column % 16 // 4 * lanes + lane) * 4 + column % 4]
        return np.int64(byte >> 4 if column >= 16 else byte & 15)
    pair, side = column // 2, column % 2
    if bits == 8:
        return np.int64(np.int8(codes[at + (pair * lanes + lane) * 2 + side]))
    code = _number_at(codes, at, 4, lanes, lane, pair, side)
    if bits > 4:
        code |= _number_at(codes, at + 16 * lanes, bits - 4, lanes, lane, pair, side) << 4
    return code


@njit(inline="always")
def _number_at(codes, at, bits, lanes, lane, pair, side):
    """A number of a few bits in the words from `at` on."""
    bit = pair * bits
    byte = codes[at + ((bit // 16 * lanes + lane) * 2 + side) * 2 + bit % 16 // 8]
    return np.int64(byte >> bit % 8) & (1 << bits) - 1
