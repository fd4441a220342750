"""Arrays that are used without counting who owns them.

Compiled code counts the owners of an array with a locked instruction whenever a record with the array is made or passed
on, which takes longer than a small product, and much longer where several threads do it.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types

from freehold.engine.cpu.vectors import intrinsic


def _define_borrow(typingctx, array):
    def codegen(context, builder, signature, values):
        view = context.make_array(array)(context, builder, values[0])
        view.meminfo = ir.Constant(view.meminfo.type, None)
        view.parent = ir.Constant(view.parent.type, None)
        return view._getvalue()

    return array(array), codegen


def _define_keep(typingctx, array):
    return types.void(array), lambda context, builder, signature, values: context.get_dummy_value()


borrow: Any = intrinsic(_define_borrow)
"""The same array, which nobody owns. Arguments of a function live as long as it runs; of other arrays somebody must
`keep` the owner until the last use."""
keep: Any = intrinsic(_define_keep)
"""Up to here an array lives."""

_njit: Any = njit  # whose declaration lacks an option


def borrowing(function: Callable[..., Any]) -> Any:
    """Compile a function of borrowed arrays. It counts no owners of anything, and may make no arrays."""
    return _njit(nogil=True, error_model="numpy", _nrt=False)(function)
