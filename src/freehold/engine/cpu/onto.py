"""The addends of products."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from freehold.contract.arrays import Float32
from freehold.engine.cpu.integer_tiles import Outputs
from freehold.engine.cpu.operation import numbers
from freehold.engine.cpu.simd import LANES

_ZEROS = np.zeros(LANES, np.float32)


class Onto(NamedTuple):
    """The addend: nothing, a bias [columns], or the output's old contents."""

    bias: Float32 | None = None
    is_output: bool = False

    def arguments(self, out: Float32) -> tuple[Float32, int, int]:
        """Return the operation's arguments: `onto`, `row_step` and `column_step` of `Outputs`."""
        if self.is_output:
            return out, out.shape[1], 1
        return (_ZEROS, 0, 0) if self.bias is None else (self.bias, 0, 1)


NOTHING, OUTPUT = Onto(), Onto(is_output=True)
ONTO = "onto row_step column_step"  # names of the arguments


def onto_bias(bias: Float32 | None) -> Onto:
    return NOTHING if bias is None else Onto(bias)


@njit(inline="always")
def outputs_of(of):
    """Return the outputs from an operation's arguments."""
    return Outputs(numbers(of.out, np.float32), of.width, of.onto, of.row_step, of.column_step)
