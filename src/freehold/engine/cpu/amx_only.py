"""Intrinsics that are instructions of AMX where the set of instructions is AMX, and nothing with another one."""

from collections.abc import Callable
from typing import Any

from numba.core import types

from freehold.engine.cpu import amx
from freehold.engine.cpu.isa import Amx
from freehold.engine.cpu.vectors import intrinsic


def is_amx(kind) -> bool:
    """Of the type of a set of instructions, or of a record whose field `isa` is one."""
    isa = kind.types[kind.fields.index("isa")] if "isa" in kind.fields else kind
    return isa.instance_class is Amx


def with_amx(emit: Callable[..., None]) -> Callable[..., Any]:
    """The code of an intrinsic without result, whose first argument says the set of instructions."""

    def codegen(context, builder, signature, values):
        if is_amx(signature.args[0]):
            emit(context, builder, signature, values)
        return context.get_dummy_value()

    return codegen


def _define_end(typingctx, weights):
    return types.void(weights), with_amx(lambda context, builder, signature, values: amx.release(builder))


end: Any = intrinsic(_define_end)
"""(weights): after products with them."""
