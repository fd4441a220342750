"""Layout of weight codes of four to six bits, in the order in which kernels read them.

A panel has as many rows as the instruction set has lanes. Its block of 32 columns takes 4 x bits x lanes bytes. First
come the lower four bits, [4, lanes, 4] bytes: byte (j, lane, i) has columns 4 j + i (low half) and 16 + 4 j + i. Planes
of the upper bits follow, [lanes, 4] bytes each: with one upper bit, bit 4 h + j of byte (lane, i) belongs to column 16
h + 4 j + i. With two, plane h has them at bits 2 j and 2 j + 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numba import njit

from freehold.engine.cpu.codes import Codes, range_of
from freehold.engine.cpu.integer_linear import FOUR_BITS, Order, nibbles
from freehold.engine.cpu.integer_tiles import BLOCK, NIBBLE_LOADS
from freehold.models.tensor import TensorFormat


# Code is compiled per type. `parts` of a block have a scale each.
class FourBits(NamedTuple):
    bits: int = 4
    parts: int = 1


class FineFourBits(NamedTuple):
    bits: int = 4
    parts: int = 2


class FiveBits(NamedTuple):
    bits: int = 5
    parts: int = 1


class SixBits(NamedTuple):
    bits: int = 6
    parts: int = 2


Form = FourBits | FineFourBits | FiveBits | SixBits
_FORMS: tuple[Form, ...] = (FourBits(), FineFourBits(), FiveBits(), SixBits())
_FINE = frozenset({TensorFormat.Q2_K, TensorFormat.Q3_K, TensorFormat.Q6_K})  # one scale per 16 columns
FEW_BITS = FOUR_BITS | _FINE | {TensorFormat.Q5_0, TensorFormat.Q5_1, TensorFormat.Q5_K}


class Coding(NamedTuple):
    """A form, the offset that makes codes non-negative, and the largest code after it."""

    form: Form
    offset: int
    most: int


def coding_of(formats: Iterable[TensorFormat]) -> Coding:
    """Return the coding with the fewest bits for one matrix of tensors in formats of FEW_BITS."""
    kinds = frozenset(formats)
    ranges = [range_of(kind) for kind in kinds]
    least, most = min(least for least, _ in ranges), max(most for _, most in ranges)
    bits, parts = (most - least).bit_length(), 2 if kinds & _FINE else 1
    return Coding(next(form for form in _FORMS if form.bits >= bits and form.parts >= parts), -least, most - least)


def pack_codes(codes: Codes, coding: Coding, order: Order) -> np.ndarray:
    """Pack the bytes of all panels, uint8, flat."""
    form, values = coding.form, codes.codes.view(np.uint8) + np.uint8(coding.offset)
    lower = order.of_codes(nibbles(values & np.uint8(15)), NIBBLE_LOADS, 4)
    if form.bits == 4:
        return lower
    bits = form.bits - 4
    upper = (values >> 4).view(np.uint32).reshape(len(values), -1, 8 // bits)  # four columns at a time
    planes = upper[:, :, 0].copy()
    for number in range(1, 8 // bits):
        planes |= upper[:, :, number] << np.uint32(bits * number)
    planes = order.of_codes(planes.view(np.uint8), bits, 4)
    blocks = (lower.reshape(-1, 16 * order.lanes), planes.reshape(-1, 4 * bits * order.lanes))
    return np.concatenate(blocks, axis=1).ravel()


@njit(inline="always")
def code_at(codes, bits, lanes, number, lane, column):
    """Return a code of block `number`, counted over all panels, as an unsigned number."""
    first = number * 4 * bits * lanes + lane * 4 + column % 4
    half, load = column // (BLOCK // 2), column % (BLOCK // 2) // 4
    code = np.int32(codes[first + load * 4 * lanes] >> 4 * half & 15)
    if bits > 4:
        bit = (half * NIBBLE_LOADS + load) * (bits - 4)
        plane = codes[first + (NIBBLE_LOADS + bit // 8) * 4 * lanes]
        code += np.int32(plane >> bit % 8 & (1 << (bits - 4)) - 1) << 4
    return code
