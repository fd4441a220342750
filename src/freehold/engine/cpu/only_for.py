"""Instructions of one set, in kernels that are compiled for any.

The compiler ends the process at an instruction that its target lacks, even where it would never run.
"""

from collections.abc import Callable
from typing import Any


def set_of(kind: Any) -> type:
    """Of the type of a set of instructions, or of a record whose field `isa` is one."""
    isa = kind.types[kind.fields.index("isa")] if "isa" in kind.fields else kind
    return isa.instance_class


def only_for(isa: type, emit: Callable[..., None]) -> Callable[..., Any]:
    """The code of an intrinsic without result, whose first argument says the set of instructions: nothing with another
    one than `isa`."""

    def codegen(context, builder, signature, values):
        if set_of(signature.args[0]) is isa:
            emit(context, builder, signature, values)
        return context.get_dummy_value()

    return codegen
