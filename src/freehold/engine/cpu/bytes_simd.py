"""Vectors of small integers as Numba values: exact products of bytes, 32 at a time.

Like `simd.py` these are intrinsics for `@njit` code, without bounds checks; `at` is a flat index of bytes
or elements. On a processor with AVX2 the products are its instructions; elsewhere LLVM makes something of
the same arithmetic. Nothing here rounds, so no order of additions matters.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models
from numba.extending import register_model

from freehold.engine.cpu.simd import intrinsic

_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_V8, _V16, _V32, _VF = (ir.VectorType(kind, n) for kind, n in ((_I8, 32), (_I16, 16), (_I32, 8), (_F32, 8)))
HAS_AVX2 = bool(llvm.get_host_cpu_features().get("avx2"))


def _vector(name: str, vector: ir.VectorType) -> Any:
    class Vector(types.Type):
        def __init__(self):
            super().__init__(name=name)

    @register_model(Vector)
    class _Model(models.PrimitiveModel):
        def __init__(self, dmm, fe_type):
            super().__init__(dmm, fe_type, vector)

    return Vector()


I8x32, I16x16, I32x8, F32x8 = (
    _vector(*one) for one in (("I8x32", _V8), ("I16x16", _V16), ("I32x8", _V32), ("F32x8", _VF))
)


def _load(kind, vector):
    @intrinsic
    def load(typingctx, array, at):
        def codegen(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            return builder.load(builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer()), align=1)

        return kind(array, types.intp), codegen

    return load


# The 32 bytes, 16 words or 8 floats from `at`; words of an array of bytes are two bytes each.
load_bytes, load_raw_words, load_floats = _load(I8x32, _V8), _load(I16x16, _V16), _load(F32x8, _VF)


@intrinsic
def load_halves(typingctx, array, at):
    """array u16[*] holding float16 values -> the 8 of them from `at`, as floats."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        vector = ir.VectorType(ir.HalfType(), 8)
        pointer = builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer())
        return builder.fpext(builder.load(pointer, align=2), _VF)

    return F32x8(array, types.intp), codegen


@intrinsic
def half_at(typingctx, array, at):
    """The float16 in element `at` of array u16[*], as a float."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.HalfType().as_pointer())
        return builder.fpext(builder.load(pointer, align=2), _F32)

    return types.float32(array, types.intp), codegen


def _store(kind, vector):
    @intrinsic
    def store(typingctx, array, at, value):
        def codegen(context, builder, signature, args):
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            builder.store(args[2], builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(array, types.intp, kind), codegen

    return store


store_bytes, store_floats = _store(I8x32, _V8), _store(F32x8, _VF)


def _splat(builder, scalar, vector):
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    order = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), order)


@intrinsic
def splat_quad(typingctx, array, at):
    """array i8[*] -> its four bytes from `at`, eight times."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        quad = builder.load(builder.bitcast(builder.gep(data, [args[1]]), _I32.as_pointer()), align=1)
        return builder.bitcast(_splat(builder, quad, _V32), _V8)

    return I8x32(array, types.intp), codegen


@intrinsic
def splat_float(typingctx, value):
    def codegen(context, builder, signature, args):
        return _splat(builder, args[0], _VF)

    return F32x8(types.float32), codegen


@intrinsic
def splat_float_at(typingctx, array, at):
    """array f32[*] -> its element `at`, eight times."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return _splat(builder, builder.load(builder.gep(data, [args[1]])), _VF)

    return F32x8(array, types.intp), codegen


@intrinsic
def low_nibbles(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.and_(args[0], ir.Constant(_V8, [15] * 32))

    return I8x32(I8x32), codegen


@intrinsic
def high_nibbles(typingctx, value):
    def codegen(context, builder, signature, args):
        return builder.lshr(args[0], ir.Constant(_V8, [4] * 32))

    return I8x32(I8x32), codegen


@intrinsic
def zero_words(typingctx):
    def codegen(context, builder, signature, args):
        return ir.Constant(_V16, [0] * 16)

    return I16x16(), codegen


@intrinsic
def add_words(typingctx, a, b):
    def codegen(context, builder, signature, args):
        return builder.add(args[0], args[1])

    return I16x16(I16x16, I16x16), codegen


def _pairs(builder, a, b, wide_a, wide_b, vector):
    """Products of neighbours, added two by two, in plain IR."""
    product = builder.mul(wide_a(a, vector), wide_b(b, vector))
    half = vector.count // 2
    undefined = ir.Constant(vector, ir.Undefined)
    order = ir.VectorType(_I32, half)
    even = builder.shuffle_vector(product, undefined, ir.Constant(order, list(range(0, vector.count, 2))))
    odd = builder.shuffle_vector(product, undefined, ir.Constant(order, list(range(1, vector.count, 2))))
    return builder.add(even, odd)


@intrinsic
def multiply_pairs(typingctx, unsigned, signed):
    """Bytes of 0 .. 127 times signed ones, added two by two: 16 words."""

    def codegen(context, builder, signature, args):
        if HAS_AVX2:
            kind = ir.FunctionType(_V16, [_V8, _V8])
            return builder.call(builder.module.declare_intrinsic("llvm.x86.avx2.pmadd.ub.sw", (), kind), args)
        unsigned, signed = args
        return _pairs(builder, unsigned, signed, builder.zext, builder.sext, ir.VectorType(_I16, 32))

    return I16x16(I8x32, I8x32), codegen


@intrinsic
def sum_pairs(typingctx, words):
    """Words added two by two, as floats: exact below 2**24."""

    def codegen(context, builder, signature, args):
        ones = ir.Constant(_V16, [1] * 16)
        if HAS_AVX2:
            kind = ir.FunctionType(_V32, [_V16, _V16])
            name = "llvm.x86.avx2.pmadd.wd"
            total = builder.call(builder.module.declare_intrinsic(name, (), kind), [args[0], ones])
        else:
            total = _pairs(builder, args[0], ones, builder.sext, builder.sext, ir.VectorType(_I32, 16))
        return builder.sitofp(total, _VF)

    return F32x8(I16x16), codegen


@intrinsic
def multiply_floats(typingctx, a, b):
    def codegen(context, builder, signature, args):
        return builder.fmul(*args)

    return F32x8(F32x8, F32x8), codegen


@intrinsic
def fma_floats(typingctx, a, b, c):
    """a * b + c, rounded once."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(_VF, [_VF] * 3)
        return builder.call(builder.module.declare_intrinsic("llvm.fma.v8f32", (), kind), args)

    return F32x8(F32x8, F32x8, F32x8), codegen


@intrinsic
def load_words(typingctx, array, at):
    """array u8[*] holding signed bytes -> the 16 of them from `at`, as words."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        vector = ir.VectorType(_I8, 16)
        raw = builder.load(builder.bitcast(builder.gep(data, [args[1]]), vector.as_pointer()), align=1)
        return builder.sext(raw, _V16)

    return I16x16(array, types.intp), codegen


@intrinsic
def word_nibbles(typingctx, words, shift):
    """Four bits of each word, from bit `shift` (a constant) on."""
    if not isinstance(shift, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        moved = builder.lshr(args[0], ir.Constant(_V16, [shift.literal_value] * 16))
        return builder.and_(moved, ir.Constant(_V16, [15] * 16))

    return I16x16(I16x16, shift), codegen


@intrinsic
def splat_pair(typingctx, array, at):
    """array i16[*] -> its two words from `at`, eight times."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pair = builder.load(builder.bitcast(builder.gep(data, [args[1]]), _I32.as_pointer()), align=2)
        return builder.bitcast(_splat(builder, pair, _V32), _V16)

    return I16x16(array, types.intp), codegen


@intrinsic
def zero_ints(typingctx):
    def codegen(context, builder, signature, args):
        return ir.Constant(_V32, [0] * 8)

    return I32x8(), codegen


@intrinsic
def add_products(typingctx, total, a, b):
    """total + words of `a` times words of `b`, added two by two."""

    def codegen(context, builder, signature, args):
        total, a, b = args
        if HAS_AVX2:
            kind = ir.FunctionType(_V32, [_V16, _V16])
            product = builder.call(builder.module.declare_intrinsic("llvm.x86.avx2.pmadd.wd", (), kind), [a, b])
        else:
            product = _pairs(builder, a, b, builder.sext, builder.sext, ir.VectorType(_I32, 16))
        return builder.add(total, product)

    return I32x8(I32x8, I16x16, I16x16), codegen


@intrinsic
def to_floats(typingctx, ints):
    def codegen(context, builder, signature, args):
        return builder.sitofp(args[0], _VF)

    return F32x8(I32x8), codegen


@intrinsic
def bits_of(typingctx, value):
    """float32 -> int32 with the same bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _I32)

    return types.int32(types.float32), codegen


@intrinsic
def float_of(typingctx, bits):
    """int32 -> float32 with the same bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), codegen
