"""Digits of inputs are the same with the instruction that picks bytes and without it."""

import numpy as np
import pytest
from llvmlite import ir
from numba import njit
from numba.core import types

from freehold.engine.cpu.row_scaled import LARGEST, _narrow, _split
from freehold.engine.cpu.simd import INTS
from freehold.engine.cpu.vectors import I64, intrinsic, pointer


def digits_by(emit):
    """A function that puts the digits of codes int32 [32] into int8 [64]."""

    def define(typingctx, codes, out):
        def codegen(context, builder, signature, values):
            halves = [
                builder.load(pointer(context, builder, codes, values[0], ir.Constant(I64, at), INTS), align=4)
                for at in (0, 16)
            ]
            for digit, found in enumerate(emit(builder, halves)):
                place = pointer(context, builder, out, values[1], ir.Constant(I64, 32 * digit), found.type)
                builder.store(found, place, align=1)
            return context.get_dummy_value()

        return types.void(codes, out), codegen

    put = intrinsic(define)

    @njit
    def digits(codes, out):
        put(codes, out)

    return digits


@pytest.mark.parametrize("emit", [_split, _narrow])
def test_two_signed_digits_are_the_code(emit):
    digits, random = digits_by(emit), np.random.default_rng(0)
    ends = [0, 1, -1, 127, 128, -128, -129, 255, 256, LARGEST, -LARGEST]
    for codes in (np.resize(ends, 32), *random.integers(-LARGEST, LARGEST + 1, (50, 32))):
        out = np.zeros(64, np.int8)
        digits(codes.astype(np.int32), out)
        low, high = out.astype(np.int32).reshape(2, 32)
        np.testing.assert_array_equal(low + 256 * high, codes)
