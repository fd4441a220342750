"""Quantizes blocks of 32 floats to integers with a scale, as `integer_tiles` and `integer_amx` read them."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from freehold.engine.cpu.integer_tiles import BLOCK, Records
from freehold.engine.cpu.simd import FLOATS, INTS, LANES
from freehold.engine.cpu.vectors import F32, I8, I16, I32, I64, constant, halves, intrinsic, math, splat

PLANE = 16 * BLOCK  # codes of a block in a tile of 16 rows


class _Emitter(Records):
    """Emits the quantization of BLOCK floats from `at` to codes from `to` on, with scale and sum number `number`."""

    def emit(self) -> None:
        builder, is_bytes = self.builder, self.kinds[2].types[0].dtype == types.int8
        limit = ir.Constant(F32, np.float32(127 if is_bytes else 32767))
        floats = [
            builder.load(self.array(0, self.linear(self.values[1], half), FLOATS), align=4) for half in (0, LANES)
        ]
        sizes = [math(builder, "fabs", [value]) for value in floats]
        largest = halves(builder, self.larger(*sizes), self.larger)
        zero = ir.Constant(F32, 0.0)
        factor = builder.select(builder.fcmp_ordered(">", largest, zero), builder.fdiv(limit, largest), zero)
        factors = splat(builder, factor, FLOATS)
        codes = [builder.fptosi(math(builder, "rint", [builder.fmul(value, factors)]), INTS) for value in floats]
        scale = builder.fdiv(largest, limit)
        total = builder.sitofp(halves(builder, builder.add(*codes), builder.add), F32)
        builder.store(scale, self.at(2, 1, self.values[3], F32))
        builder.store(builder.fmul(scale, total), self.at(2, 2, self.values[3], F32))
        both = builder.shuffle_vector(*codes, ir.Constant(ir.VectorType(I32, BLOCK), list(range(BLOCK))))
        self.put(both, is_bytes)

    def larger(self, a, b):
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def put(self, codes, is_bytes: bool) -> None:
        """Store codes. In a tile, 16-bit codes are split into two planes of bytes."""
        builder, is_tile = self.builder, self.values[5]
        bytes_, words = ir.VectorType(I8, BLOCK), ir.VectorType(I16, BLOCK)
        to = self.at(2, 0, self.values[4], I8)
        if is_bytes:
            builder.store(builder.trunc(codes, bytes_), builder.bitcast(to, bytes_.as_pointer()), align=1)
            return
        narrow = builder.trunc(codes, words)
        with builder.if_else(is_tile) as (in_tile, in_row):
            with in_tile:
                upper = builder.trunc(builder.lshr(narrow, constant(words, 8)), bytes_)
                for plane, values in enumerate((builder.trunc(narrow, bytes_), upper)):
                    where = builder.gep(to, [ir.Constant(I64, plane * PLANE)])
                    builder.store(values, builder.bitcast(where, bytes_.as_pointer()), align=1)
            with in_row:
                builder.store(narrow, builder.bitcast(to, words.as_pointer()), align=2)


def _define(typingctx, floats, at, inputs, number, to, is_tile):
    def codegen(context, builder, signature, values):
        _Emitter(context, builder, signature, values).emit()
        return context.get_dummy_value()

    return types.void(floats, types.intp, inputs, types.intp, types.intp, types.boolean), codegen


quantize_block: Any = intrinsic(_define)
"""(floats, at, inputs, number, to, is_tile): quantize the 32 floats from `at` to codes of `Inputs` from code `to` on,
rounded to nearest, ties to even, with scale and sum number `number`. In a tile of 16-bit codes, a row's bytes take the
place of 16 codes, and are followed by those of the other rows."""
