"""Vectors of 16 floats as Numba values: `F32x16` is one zmm register on AVX-512 and two ymm registers on AVX2, with the
same results on both.

All functions here are Numba intrinsics: they can be called only from `@njit` code, do no bounds checks, and `at` is a
flat element index into a C-contiguous array.
"""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models
from numba.extending import register_model

from freehold.engine.cpu.vectors import (
    F16,
    F32,
    I8,
    I16,
    I32,
    constant,
    halves,
    intrinsic,
    math,
    pointer,
    widen_bf16,
)
from freehold.engine.cpu.vectors import splat as in_all_lanes

LANES = 16
FLOATS, INTS, WORDS, BYTES = (ir.VectorType(kind, LANES) for kind in (F32, I32, I16, I8))


class _Vector(types.Type):
    def __init__(self):
        super().__init__(name="F32x16")


F32x16 = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, FLOATS)


def _named(define: Callable[..., Any], emit: Callable[..., Any]) -> Any:
    define.__name__, define.__doc__ = emit.__name__, emit.__doc__
    return intrinsic(define)


def _operation(result: types.Type, *arguments: types.Type) -> Callable[..., Any]:
    """Make an intrinsic of emit(builder, *values)."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def define(typingctx, *given):
            return result(*arguments), lambda context, builder, signature, values: emit(builder, *values)

        names = ["typingctx", *(f"a{i}" for i in range(len(arguments)))]
        parameters = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in names]
        define.__signature__ = Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        return _named(define, emit)

    return decorate


def _reading(result: types.Type) -> Callable[..., Any]:
    """Make an intrinsic (array, at) of emit(builder, where, dtype); where(kind) is a pointer to element `at`."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def define(typingctx, array, at):
            def codegen(context, builder, signature, values):
                return emit(
                    builder, lambda kind: pointer(context, builder, array, values[0], values[1], kind), array.dtype
                )

            return result(array, types.intp), codegen

        return _named(define, emit)

    return decorate


def _writing(value: types.Type) -> Callable[..., Any]:
    """Make an intrinsic (array, at, value) of emit(builder, where, dtype, value)."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def define(typingctx, array, at, given):
            def codegen(context, builder, signature, values):
                data, at, new = values
                emit(builder, lambda kind: pointer(context, builder, array, data, at, kind), array.dtype, new)
                return context.get_dummy_value()

            return types.void(array, types.intp, value), codegen

        return _named(define, emit)

    return decorate


# -- arrays -------------------------------------------------------------------------------------------


def lanes(builder, where, dtype):
    """Load the 16 numbers from element `at` of f32[*], u16[*] holding bfloat16, or i8[*], as floats.

    From u8[*] holding floats, load the 16 from byte `at`.
    """
    if dtype == types.uint16:
        return widen_bf16(builder, builder.load(where(WORDS), align=2))
    if dtype == types.int8:
        return builder.sitofp(builder.sext(builder.load(where(BYTES), align=1), INTS), FLOATS)
    return builder.load(where(FLOATS), align=4)


load = _reading(F32x16)(lanes)


@_reading(types.float32)
def element(builder, where, dtype):
    """Load one element of the arrays that `load` takes."""
    if dtype == types.uint16:
        return widen_bf16(builder, builder.load(where(I16)))
    return builder.sitofp(builder.load(where(I8)), F32) if dtype == types.int8 else builder.load(where(F32))


@_reading(types.float32)
def scale_at(builder, where, dtype):
    """Load element `at` of f32[*], or of u16[*] holding float16."""
    return builder.fpext(builder.load(where(F16)), F32) if dtype == types.uint16 else builder.load(where(F32))


def _upper_words(builder, bits):
    """Return the upper words of 16 integers."""
    return builder.trunc(builder.lshr(bits, constant(INTS, 16)), WORDS)


def _rounded(builder, dtype, value):
    """Convert 16 floats to the type of an array of `dtype`, rounded to nearest, ties to even; they must fit."""
    if dtype == types.uint16:
        bits = builder.bitcast(value, INTS)
        odd = builder.and_(builder.lshr(bits, constant(INTS, 16)), constant(INTS, 1))
        bits = builder.add(bits, builder.add(odd, constant(INTS, 0x7FFF)))
        return _upper_words(builder, bits)
    return builder.fptosi(math(builder, "rint", [value]), BYTES) if dtype == types.int8 else value


@_writing(F32x16)
def put(builder, where, dtype, value):
    """Write 16 floats to an array that `load` takes, rounded."""
    rounded = _rounded(builder, dtype, value)
    builder.store(rounded, where(rounded.type), align=1)


@_writing(F32x16)
def put_apart(builder, where, dtype, value):
    """Write likewise, but with elements 16 apart."""
    rounded = _rounded(builder, dtype, value)
    first = where(rounded.type.element)
    for lane in range(LANES):
        place = builder.gep(first, [ir.Constant(I32, lane * LANES)])
        builder.store(builder.extract_element(rounded, ir.Constant(I32, lane)), place)


@_writing(F32x16)
def put_bf16(builder, where, dtype, value):
    """Write 16 floats that are bfloat16 values to an array u16[*]."""
    builder.store(_upper_words(builder, builder.bitcast(value, INTS)), where(WORDS), align=2)


@_writing(F32x16)
def store(builder, where, dtype, value):
    """Write 16 floats to array f32[*] from `at`."""
    builder.store(value, where(FLOATS), align=4)


def _define_stream(typingctx, source, at, target, to):
    def codegen(context, builder, signature, values):
        kind = ir.VectorType(I32, 4)
        number = builder.load(pointer(context, builder, source, values[0], values[1], kind), align=4)
        written = builder.store(number, pointer(context, builder, target, values[2], values[3], kind), align=16)
        written.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))
        return context.get_dummy_value()

    return types.void(source, types.intp, target, types.intp), codegen


stream = intrinsic(_define_stream)
"""Copy 4 words from `at` of u32[*] to `to` of u32[*], at an address aligned to 16 bytes, past the caches (a
non-temporal store)."""


@_reading(F32x16)
def load_i8(builder, where, dtype):
    """Load the 16 signed bytes from `at` of u8[*] as floats."""
    return builder.sitofp(builder.sext(builder.load(where(BYTES), align=1), INTS), FLOATS)


@_reading(F32x16)
def load_low_nibbles(builder, where, dtype):
    """Load the low halves of 16 bytes of u8[*] as floats."""
    nibbles = builder.and_(builder.load(where(BYTES), align=1), constant(BYTES, 15))
    return builder.sitofp(builder.zext(nibbles, INTS), FLOATS)


@_reading(F32x16)
def load_high_nibbles(builder, where, dtype):
    """Load the high halves of 16 bytes of u8[*] as floats."""
    nibbles = builder.lshr(builder.load(where(BYTES), align=1), constant(BYTES, 4))
    return builder.sitofp(builder.zext(nibbles, INTS), FLOATS)


@_reading(F32x16)
def load_bf16(builder, where, dtype):
    """Load the 16 bfloat16 from byte `at` of u8[*] as floats."""
    return widen_bf16(builder, builder.load(where(WORDS), align=2))


@_reading(F32x16)
def splat_at(builder, where, dtype):
    """Load element `at` of f32[*] into all 16 lanes."""
    return in_all_lanes(builder, builder.load(where(F32)), FLOATS)


# -- values -------------------------------------------------------------------------------------------


@_operation(F32x16, types.float32)
def splat(builder, value):
    """Put one float in all 16 lanes."""
    return in_all_lanes(builder, value, FLOATS)


@_operation(F32x16, F32x16, F32x16)
def add(builder, a, b):
    return builder.fadd(a, b)


@_operation(F32x16, F32x16, F32x16)
def sub(builder, a, b):
    return builder.fsub(a, b)


@_operation(F32x16, F32x16, F32x16)
def mul(builder, a, b):
    return builder.fmul(a, b)


@_operation(F32x16, F32x16, F32x16, F32x16)
def fma(builder, a, b, c):
    """Return a * b + c, rounded once."""
    return math(builder, "fma", [a, b, c])


@_operation(F32x16, F32x16)
def round_bf16(builder, a):
    """Round to the nearest bfloat16 value, ties to even."""
    return widen_bf16(builder, _rounded(builder, types.uint16, a))


def _larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@_operation(F32x16, F32x16, F32x16)
def maximum(builder, a, b):
    return _larger(builder, a, b)


@_operation(types.float32, F32x16)
def sum_lanes(builder, a):
    return halves(builder, a, builder.fadd)


@_operation(types.float32, F32x16)
def max_lanes(builder, a):
    return halves(builder, a, lambda x, y: _larger(builder, x, y))


@_operation(F32x16, F32x16, types.intp, F32x16)
def keep_first(builder, a, count, other):
    """Return lanes `< count` of `a`, the rest from `other`."""
    lane = ir.Constant(INTS, list(range(LANES)))
    limit = in_all_lanes(builder, builder.trunc(count, I32), INTS)
    return builder.select(builder.icmp_signed("<", lane, limit), a, other)


def _number(value):
    return constant(FLOATS, float(value))


def _fused(builder, x, y, z):
    return math(builder, "fma", [x, y, z])


def _polynomial(builder, terms, x):
    """Return terms[0] * x**n + ... + terms[n], by Horner's rule."""
    y = _number(terms[0])
    for term in terms[1:]:
        y = _fused(builder, y, x, _number(term))
    return y


_LOG2_E = 1.44269504088896341
# Cephes single-precision expf: |relative error| < 2e-7 on the clamped range.
_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_EXP_MIN, _EXP_MAX = -87.3, 88.3


@_operation(F32x16, F32x16)
def exp(builder, a):
    """Return e**a. Lanes at or below -87.3 give exactly 0 (a masked score is -inf)."""
    x = builder.select(builder.fcmp_ordered("<", a, _number(_EXP_MAX)), a, _number(_EXP_MAX))
    tiny = builder.fcmp_ordered("<=", x, _number(_EXP_MIN))
    x = builder.select(tiny, _number(_EXP_MIN), x)
    n = math(builder, "floor", [_fused(builder, x, _number(_LOG2_E), _number(0.5))])
    r = _fused(builder, n, _number(-0.693359375), x)
    r = _fused(builder, n, _number(2.12194440e-4), r)
    y = _polynomial(builder, _EXP_TERMS, r)
    y = _fused(builder, y, builder.fmul(r, r), builder.fadd(r, _number(1.0)))
    exponent = builder.add(builder.fptosi(n, INTS), constant(INTS, 127))
    scale = builder.bitcast(builder.shl(exponent, constant(INTS, 23)), FLOATS)
    return builder.select(tiny, _number(0.0), builder.fmul(y, scale))


# Of all degree-4 polynomials that are 1 at 0, the one with the least relative error on [-ln(2) / 2, ln(2) / 2].
_SHORT_EXP_TERMS = (0.04151369631290436, 0.16787457466125488, 0.5000301599502563, 0.9999668598175049, 1.0)
_ROUNDING = 12582912.0  # 1.5 * 2**23: the last bits of a float plus this number are the nearest integer


@_operation(F32x16, F32x16)
def exp_bf16(builder, a):
    """Return e**a rounded to bfloat16, for a at most 88. The relative error before rounding is below 2**-18. Lanes at
    or below -87.3 give exactly 0."""
    x = _larger(builder, a, _number(_EXP_MIN))
    shifted = _fused(builder, x, _number(_LOG2_E), _number(_ROUNDING))
    n = builder.fsub(shifted, _number(_ROUNDING))
    r = _fused(builder, n, _number(-0.69314718055994531), x)
    y = _polynomial(builder, _SHORT_EXP_TERMS, r)
    exponent = builder.shl(builder.bitcast(shifted, INTS), constant(INTS, 23))
    rounded = builder.add(builder.add(builder.bitcast(y, INTS), constant(INTS, 0x8000)), exponent)
    value = builder.bitcast(builder.and_(rounded, constant(INTS, -0x10000)), FLOATS)
    return builder.select(builder.fcmp_ordered(">", a, _number(_EXP_MIN)), value, _number(0.0))


@_operation(F32x16, F32x16)
def reciprocal(builder, a):
    """Return 1 / a, correctly rounded."""
    return builder.fdiv(constant(FLOATS, 1.0), a)
