"""What a product is added to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from freehold.arrays import Float32
from freehold.engine.cpu.integer_tiles import GROUP
from freehold.engine.cpu.operation import numbers
from freehold.engine.cpu.simd import LANES, load, splat, store


class Onto(NamedTuple):
    """Nothing, a bias [columns], or what the output holds already."""

    bias: Float32 | None = None
    is_output: bool = False

    @property
    def arguments(self) -> tuple[int, Float32 | int]:
        """Of an operation: `adds` and `bias`."""
        return int(self.is_output), 0 if self.bias is None else self.bias


NOTHING, OUTPUT = Onto(), Onto(is_output=True)


def onto_bias(bias: Float32 | None) -> Onto:
    return NOTHING if bias is None else Onto(bias)


@njit(inline="always")
def begin_outputs(outputs, adds, bias, group, first, last):
    """Give the columns of a group in rows `first` up to `last` of outputs what their products are added to. `bias` is
    an address, 0 for none."""
    if adds:
        return
    start = group * GROUP
    values, biases, end = outputs.values, numbers(bias, np.float32), min(start + GROUP, outputs.width)
    for row in range(first, last):
        at = row * outputs.width
        for column in range(start, end - LANES + 1, LANES):
            store(values, at + column, load(biases, column) if bias else splat(np.float32(0)))
        for column in range(end - (end - start) % LANES, end):
            values[at + column] = biases[column] if bias else np.float32(0)
