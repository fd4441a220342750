"""LLVM vectors, for the intrinsics of this folder: functions that emit instructions.

LLVM's auto-vectorization picks the order of a sum's reduction, differently for different loop shapes. Freehold wants
bit-identical logits for any batch or chunk, so kernels state explicitly what is a lane and what is a step.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic as numba_intrinsic

F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def intrinsic(emit: Callable[..., Any]) -> Any:
    """Apply Numba's decorator, which drops the typing context from the signature: type checkers can't follow that."""
    return numba_intrinsic(emit)


def pointer(context, builder, array_type, array, at, kind):
    """Return a pointer to element `at` of an array, as a `kind`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), kind.as_pointer())


def constant(vector, value):
    """Return one number in all lanes."""
    return ir.Constant(vector, [value] * vector.count)


def splat(builder, scalar, vector):
    """Return one value in all lanes."""
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(
        first, ir.Constant(vector, ir.Undefined), constant(ir.VectorType(I32, vector.count), 0)
    )


def call(builder, name, result, arguments):
    """Call an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), arguments)


def math(builder, name, arguments):
    """Call an LLVM intrinsic for vectors of floats, such as `fma` and `floor`."""
    vector = arguments[0].type
    bits = 64 if vector.element == F64 else 32
    return call(builder, f"llvm.{name}.v{vector.count}f{bits}", vector, arguments)


def in_turns(builder, a, b):
    """Interleave: the first number of `a`, the first of `b`, the second of `a`, ...: twice as many lanes."""
    count = a.type.count
    order = [lane + count * side for lane in range(count) for side in range(2)]
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, 2 * count), order))


def slice_of(builder, value, count, number):
    """Return the slice number `number` of `count` lanes."""
    order = ir.Constant(ir.VectorType(I32, count), list(range(number * count, (number + 1) * count)))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), order)


def joined(builder, a, b):
    """Concatenate the lanes of `a` and `b`."""
    count = 2 * a.type.count
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, count), list(range(count))))


def pairwise(builder, value, combine):
    """Combine neighbours: half as many lanes."""
    half = value.type.count // 2
    undefined, order = ir.Constant(value.type, ir.Undefined), ir.VectorType(I32, half)
    even, odd = (
        builder.shuffle_vector(value, undefined, ir.Constant(order, list(range(side, 2 * half, 2)))) for side in (0, 1)
    )
    return combine(even, odd)


def halves(builder, value, combine):
    """Fold the upper half onto the lower until one lane is left: a fixed order of reduction."""
    width = value.type.count
    while width > 1:
        width //= 2
        undefined, order = ir.Constant(value.type, ir.Undefined), ir.VectorType(I32, width)
        low, high = (
            builder.shuffle_vector(value, undefined, ir.Constant(order, list(range(first, first + width))))
            for first in (0, width)
        )
        value = combine(low, high)
    return builder.extract_element(value, ir.Constant(I32, 0))


def widen_bf16(builder, values):
    """Convert bits of bfloat16 values, a scalar or a vector, to floats."""
    if isinstance(values.type, ir.VectorType):
        wide, floats = (ir.VectorType(kind, values.type.count) for kind in (I32, F32))
        return builder.bitcast(builder.shl(builder.zext(values, wide), constant(wide, 16)), floats)
    return builder.bitcast(builder.shl(builder.zext(values, I32), ir.Constant(I32, 16)), F32)


NEAREST, SECOND = 3, 2  # cache levels


def prefetch(builder, where, cache: int = NEAREST) -> None:
    """Prefetch the line of memory at `where` to a cache."""
    to_read, level, data = (ir.Constant(I32, number) for number in (0, cache, 1))
    call(builder, "llvm.prefetch.p0i8", ir.VoidType(), [builder.bitcast(where, I8.as_pointer()), to_read, level, data])
