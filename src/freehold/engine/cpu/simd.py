"""Vectors of 16 floats as Numba values.

LLVM auto-vectorisation decides by itself in which order a sum is reduced, and decides differently for
different loop shapes. Freehold wants every logit to be the same bits whatever batch or chunk computed
it, so the kernels say explicitly what is a lane and what is a step. `F32x16` becomes one zmm register
on AVX-512 and two ymm registers on AVX2, with the same results on both.

All functions here are Numba intrinsics: they can be called only from `@njit` code, they do no bounds
checks, and `at` is a flat element index into a C-contiguous array.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import register_model

LANES = 16

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I16 = ir.IntType(16)
_I8 = ir.IntType(8)
_VF = ir.VectorType(_F32, LANES)
_VI = ir.VectorType(_I32, LANES)


def intrinsic(builder: Callable[..., Any]) -> Any:
    """Numba's decorator drops the typing context from the signature, which type checkers can't follow."""
    return numba_intrinsic(builder)


class _Vector(types.Type):
    def __init__(self):
        super().__init__(name="F32x16")


F32x16 = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _VF)


def _address(context, builder, array_type, array, at, vector):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), vector.as_pointer())


def _splat(builder, scalar, vector):
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    order = ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), order)


def _constant(value):
    return ir.Constant(_VF, [float(value)] * LANES)


def _call(builder, name, vector, args):
    suffix = "v16f32" if vector == _VF else "v16i32"
    kind = ir.FunctionType(vector, [vector] * len(args))
    return builder.call(builder.module.declare_intrinsic(f"{name}.{suffix}", (), kind), args)


@intrinsic
def load(typingctx, array, at):
    """array f32[*], u16[*] holding bfloat16 values, or i8[*] -> the 16 numbers from element `at`, as floats.

    array u8[*] holding floats -> the 16 from byte `at`.
    """

    def codegen(context, builder, signature, args):
        array_type = signature.args[0]
        if array_type.dtype == types.uint16:
            pointer = _address(context, builder, array_type, args[0], args[1], ir.VectorType(_I16, LANES))
            return _widen_bf16(builder, builder.load(pointer, align=2))
        if array_type.dtype == types.int8:
            pointer = _address(context, builder, array_type, args[0], args[1], ir.VectorType(_I8, LANES))
            return builder.sitofp(builder.sext(builder.load(pointer, align=1), _VI), _VF)
        return builder.load(_address(context, builder, array_type, args[0], args[1], _VF), align=4)

    return F32x16(array, types.intp), codegen


def _widen_bf16(builder, halves):
    return builder.bitcast(builder.shl(builder.zext(halves, _VI), ir.Constant(_VI, [16] * LANES)), _VF)


@intrinsic
def element(typingctx, array, at):
    """One of those that `load` takes."""

    def codegen(context, builder, signature, args):
        array_type = signature.args[0]
        data = context.make_array(array_type)(context, builder, args[0]).data
        value = builder.load(builder.gep(data, [args[1]]))
        if array_type.dtype == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(value, _I32), ir.Constant(_I32, 16)), _F32)
        return builder.sitofp(value, _F32) if array_type.dtype == types.int8 else value

    return types.float32(array, types.intp), codegen


@intrinsic
def put(typingctx, array, at, value):
    """Write one float to what `load` takes, rounded to the nearest that it holds, ties to even; it must fit."""

    def codegen(context, builder, signature, args):
        array_type = signature.args[0]
        pointer = builder.gep(context.make_array(array_type)(context, builder, args[0]).data, [args[1]])
        value = args[2]
        if array_type.dtype == types.uint16:
            bits = builder.bitcast(value, _I32)
            odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
            bits = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
            value = builder.trunc(builder.lshr(bits, ir.Constant(_I32, 16)), _I16)
        elif array_type.dtype == types.int8:
            kind = ir.FunctionType(_F32, [_F32])
            value = builder.call(builder.module.declare_intrinsic("llvm.rint.f32", (), kind), [value])
            value = builder.fptosi(value, _I8)
        builder.store(value, pointer)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


@intrinsic
def store(typingctx, array, at, value):
    """Write 16 floats to array f32[*] from `at`."""

    def codegen(context, builder, signature, args):
        pointer = _address(context, builder, signature.args[0], args[0], args[1], _VF)
        builder.store(args[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, F32x16), codegen


@intrinsic
def load_i8(typingctx, array, at):
    """array u8[*] holding signed bytes -> the 16 of them from `at`, as floats."""

    def codegen(context, builder, signature, args):
        vector = ir.VectorType(_I8, LANES)
        pointer = _address(context, builder, signature.args[0], args[0], args[1], vector)
        return builder.sitofp(builder.sext(builder.load(pointer, align=1), _VI), _VF)

    return F32x16(array, types.intp), codegen


def _load_nibbles(high):
    @intrinsic
    def load_nibbles(typingctx, array, at):
        def codegen(context, builder, signature, args):
            vector = ir.VectorType(_I8, LANES)
            pointer = _address(context, builder, signature.args[0], args[0], args[1], vector)
            raw = builder.load(pointer, align=1)
            four = ir.Constant(vector, [4] * LANES)
            mask = ir.Constant(vector, [15] * LANES)
            nibble = builder.lshr(raw, four) if high else builder.and_(raw, mask)
            return builder.sitofp(builder.zext(nibble, _VI), _VF)

        return F32x16(array, types.intp), codegen

    return load_nibbles


load_low_nibbles = _load_nibbles(high=False)
load_high_nibbles = _load_nibbles(high=True)


@intrinsic
def load_bf16(typingctx, array, at):
    """array u8[*] holding bfloat16 values -> the 16 of them from byte `at`, as floats."""

    def codegen(context, builder, signature, args):
        pointer = _address(context, builder, signature.args[0], args[0], args[1], ir.VectorType(_I16, LANES))
        return _widen_bf16(builder, builder.load(pointer, align=2))

    return F32x16(array, types.intp), codegen


@intrinsic
def splat(typingctx, value):
    """One float in all 16 lanes."""

    def codegen(context, builder, signature, args):
        return _splat(builder, args[0], _VF)

    return F32x16(types.float32), codegen


@intrinsic
def splat_at(typingctx, array, at):
    """array f32[*] -> its element `at` in all 16 lanes."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return _splat(builder, builder.load(builder.gep(data, [args[1]])), _VF)

    return F32x16(array, types.intp), codegen


def _binary(name):
    @intrinsic
    def operation(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return getattr(builder, name)(args[0], args[1])

        return F32x16(F32x16, F32x16), codegen

    return operation


add, sub, mul = _binary("fadd"), _binary("fsub"), _binary("fmul")


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, rounded once."""

    def codegen(context, builder, signature, args):
        return _call(builder, "llvm.fma", _VF, args)

    return F32x16(F32x16, F32x16, F32x16), codegen


@intrinsic
def maximum(typingctx, a, b):
    def codegen(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return F32x16(F32x16, F32x16), codegen


def _halve(builder, value, combine):
    """Fold the upper half onto the lower until one lane is left: a fixed order of reduction."""
    width = LANES
    while width > 1:
        width //= 2
        undefined = ir.Constant(value.type, ir.Undefined)
        low = ir.Constant(ir.VectorType(_I32, width), list(range(width)))
        high = ir.Constant(ir.VectorType(_I32, width), list(range(width, 2 * width)))
        value = combine(
            builder.shuffle_vector(value, undefined, low),
            builder.shuffle_vector(value, undefined, high),
        )
    return builder.extract_element(value, ir.Constant(_I32, 0))


@intrinsic
def sum_lanes(typingctx, a):
    def codegen(context, builder, signature, args):
        return _halve(builder, args[0], builder.fadd)

    return types.float32(F32x16), codegen


@intrinsic
def max_lanes(typingctx, a):
    def codegen(context, builder, signature, args):
        def larger(x, y):
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        return _halve(builder, args[0], larger)

    return types.float32(F32x16), codegen


@intrinsic
def keep_first(typingctx, a, count, other):
    """Lanes `< count` of `a`, the rest from `other`."""

    def codegen(context, builder, signature, args):
        lane = ir.Constant(_VI, list(range(LANES)))
        limit = _splat(builder, builder.trunc(args[1], _I32), _VI)
        return builder.select(builder.icmp_signed("<", lane, limit), args[0], args[2])

    return F32x16(F32x16, types.intp, F32x16), codegen


# Cephes single-precision expf: |relative error| < 2e-7 on the clamped range.
_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_EXP_MIN, _EXP_MAX = -87.3, 88.3


@intrinsic
def exp(typingctx, a):
    """e**a. Lanes at or below -87.3 give exactly 0 (a masked score is -inf)."""

    def codegen(context, builder, signature, args):
        def fused(x, y, z):
            return _call(builder, "llvm.fma", _VF, [x, y, z])

        x = builder.select(builder.fcmp_ordered("<", args[0], _constant(_EXP_MAX)), args[0], _constant(_EXP_MAX))
        tiny = builder.fcmp_ordered("<=", x, _constant(_EXP_MIN))
        x = builder.select(tiny, _constant(_EXP_MIN), x)
        n = _call(builder, "llvm.floor", _VF, [fused(x, _constant(1.44269504088896341), _constant(0.5))])
        r = fused(n, _constant(-0.693359375), x)
        r = fused(n, _constant(2.12194440e-4), r)
        y = _constant(_EXP_TERMS[0])
        for term in _EXP_TERMS[1:]:
            y = fused(y, r, _constant(term))
        y = fused(y, builder.fmul(r, r), builder.fadd(r, _constant(1.0)))
        exponent = builder.add(builder.fptosi(n, _VI), ir.Constant(_VI, [127] * LANES))
        scale = builder.bitcast(builder.shl(exponent, ir.Constant(_VI, [23] * LANES)), _VF)
        return builder.select(tiny, _constant(0.0), builder.fmul(y, scale))

    return F32x16(F32x16), codegen


@intrinsic
def reciprocal(typingctx, a):
    """1 / a, correctly rounded."""

    def codegen(context, builder, signature, args):
        return builder.fdiv(_constant(1.0), args[0])

    return F32x16(F32x16), codegen
