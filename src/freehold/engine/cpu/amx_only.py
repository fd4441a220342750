"""Intrinsics that emit AMX instructions if the instruction set is AMX, else nothing."""

from collections.abc import Callable
from typing import Any

from numba.core import types

from freehold.engine.cpu import amx
from freehold.engine.cpu.isa import Amx
from freehold.engine.cpu.only_for import only_for, set_of
from freehold.engine.cpu.vectors import intrinsic


def is_amx(kind) -> bool:
    """Return whether a type is AMX, or a record whose field `isa` is AMX."""
    return set_of(kind) is Amx


def with_amx(emit: Callable[..., None]) -> Callable[..., Any]:
    """Return the code of an intrinsic without result, whose first argument gives the instruction set."""
    return only_for(Amx, emit)


def _define_end(typingctx, weights):
    return types.void(weights), with_amx(lambda context, builder, signature, values: amx.release(builder))


end: Any = intrinsic(_define_end)
"""(weights): after products with these weights."""
