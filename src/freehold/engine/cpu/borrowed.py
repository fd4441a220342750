"""Arrays used without reference counting.

Compiled code counts an array's references with an atomic instruction whenever a record with it is made or passed on.
That takes longer than a small product, and much longer with several threads.
"""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.np import arrayobj

from freehold.engine.cpu.cache_line import LINE
from freehold.engine.cpu.vectors import F32, I8, I64, intrinsic

_arrayobj: Any = arrayobj


def _define_borrow(typingctx, array):
    def codegen(context, builder, signature, values):
        view = context.make_array(array)(context, builder, values[0])
        view.meminfo = ir.Constant(view.meminfo.type, None)
        view.parent = ir.Constant(view.parent.type, None)
        return view._getvalue()

    return array(array), codegen


def _define_keep(typingctx, array):
    return types.void(array), lambda context, builder, signature, values: context.get_dummy_value()


def _define_take(typingctx, count):
    array = types.Array(types.float32, 1, "C")

    def codegen(context, builder, signature, values):
        size, line = ir.Constant(I64, 4), ir.Constant(I64, LINE)
        lines = builder.udiv(builder.add(values[0], ir.Constant(I64, LINE // 4 - 1)), ir.Constant(I64, LINE // 4))
        kind = ir.FunctionType(I8.as_pointer(), [I64, I64])
        allocate = cgutils.get_or_insert_function(builder.module, kind, "aligned_alloc")
        data = builder.bitcast(builder.call(allocate, [line, builder.mul(lines, line)]), F32.as_pointer())
        view = context.make_array(array)(context, builder)
        _arrayobj.populate_array(view, data=data, shape=[values[0]], strides=[size], itemsize=size, meminfo=None)
        return view._getvalue()

    return array(types.int64), codegen


def _define_give_back(typingctx, array):
    def codegen(context, builder, signature, values):
        data = context.make_array(array)(context, builder, values[0]).data
        free = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), [I8.as_pointer()]), "free")
        builder.call(free, [builder.bitcast(data, I8.as_pointer())])
        return context.get_dummy_value()

    return types.void(array), codegen


borrow: Any = intrinsic(_define_borrow)
"""The same array without reference counting. Arguments live as long as the function runs; for other arrays, `keep` must
hold the owner until the last use."""
keep: Any = intrinsic(_define_keep)
"""Keep an array alive up to here."""

take: Any = intrinsic(_define_take)
"""(count): an uncounted array of floats, aligned to a cache line. The caller must `give_back` it."""
give_back: Any = intrinsic(_define_give_back)
"""(array): free an array made by `take`."""
