"""Instructions of one set, in kernels compiled for any.

The compiler aborts the process at an instruction that its target lacks, even if it would never run.
"""

from collections.abc import Callable
from typing import Any


def set_of(kind: Any) -> type:
    """Return the instruction set of a type, or of a record's field `isa`."""
    isa = kind.types[kind.fields.index("isa")] if "isa" in kind.fields else kind
    return isa.instance_class


def only_for(isa: type, emit: Callable[..., None]) -> Callable[..., Any]:
    """Return the code of an intrinsic without result, whose first argument gives the instruction set. It emits nothing
    for sets other than `isa`."""

    def codegen(context, builder, signature, values):
        if set_of(signature.args[0]) is isa:
            emit(context, builder, signature, values)
        return context.get_dummy_value()

    return codegen
