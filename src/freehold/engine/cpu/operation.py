"""Operations: compiled functions over a range of tasks, with arguments in memory.

Everything that an operation needs is found by address. So a list of operations can run without Python in between, and
be replayed for other numbers in the same arrays (`program.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import cfunc, from_dtype, njit, prange, types
from numba.core import event
from numba.np import arrayobj

from freehold.engine.cpu.atomics import call_tasks, read
from freehold.engine.cpu.vectors import I64, intrinsic

_arrayobj: Any = arrayobj
_cfunc: Any = cfunc  # its type stub lacks an option
PIECES = 4  # pieces of an operation per thread

# The words of an operation: the compiled function, the address of its arguments, and the address of a number and a
# factor whose product counts the tasks. A Numba loop (`team`) also has sizes, steps, data, and the number of sizes and
# arguments; arguments of task i begin i steps further.
FUNCTION, ARGUMENTS, COUNT_AT, FACTOR, COUNT, SIZES, STEPS, DATA, INNER, ARRAYS = range(10)
WORDS = 10
BYTES = 8 * WORDS


TABLE_ROW = Struct(f"{WORDS}q")


class Operation(NamedTuple):
    """A compiled function: void(address of its arguments, first task, stop), and its argument layout."""

    address: int
    arguments: Struct


def fields(names: str) -> np.dtype[Any]:
    """Return a record type of numbers: float64 where ":f" follows a name, else int64, including addresses."""
    split = [name.partition(":") for name in names.split()]
    return np.dtype([(name, np.float64 if is_float else np.int64) for name, is_float, _ in split])


def compiled(function: Callable[..., None], arguments: np.dtype[Any], counts_owners: bool = True) -> Operation:
    """Compile `function(at, first, stop)`, which runs tasks; `given(at)` are its arguments. `counts_owners`: whether it
    counts array references; if not, it must not make arrays."""
    kind = types.void(types.CPointer(from_dtype(arguments)), types.int64, types.int64)
    with event.trigger_event("freehold:compile", data={"name": function.__name__}):
        code = _cfunc(kind, cache=True, error_model="numpy", _nrt=counts_owners)(function)
    _code.append(code)
    address: Any = code.address
    formats = ("d" if arguments[name] == np.float64 else "q" for name in arguments.names or ())
    return Operation(address, Struct("".join(formats)))


made_once: Any = lru_cache(None, typed=True)
"""Caches a function that makes an operation, so that each is compiled once. Instruction sets are named tuples, and
those with as many lanes are equal, so arguments of different types count as different."""

_code: list[Any] = []  # lives as long as the process, like Numba's kernels


@intrinsic
def given(typingctx, at):
    """Return the arguments at an address."""
    return at.dtype(at), lambda context, builder, signature, values: builder.bitcast(
        values[0], context.get_value_type(at.dtype)
    )


@intrinsic
def counted(typingctx, address, kind, count):
    """Return `count` numbers of a type at an address, as an array without reference counting."""
    array = types.Array(kind.instance_type, 1, "C")

    def codegen(context, builder, signature, values):
        view = context.make_array(array)(context, builder)
        data = builder.inttoptr(values[0], context.get_data_type(array.dtype).as_pointer())
        size = ir.Constant(I64, context.get_abi_sizeof(context.get_data_type(array.dtype)))
        _arrayobj.populate_array(view, data=data, shape=[values[2]], strides=[size], itemsize=size, meminfo=None)
        return view._getvalue()

    return array(types.int64, kind, types.int64), codegen


@njit(inline="always")
def numbers(address, kind):
    """Return such an array where the count doesn't matter: its length is meaningless."""
    return counted(address, kind, 1 << 40)


@njit(nogil=True, cache=True)
def address(array):
    """Return the address of an array's first number. Much faster than NumPy's attribute."""
    return array.ctypes.data


@njit(inline="always")
def task_count(operation):
    """Return the task count of the operation at an address."""
    return read(read(operation, COUNT_AT), 0) * read(operation, FACTOR)


@njit(nogil=True, cache=True, parallel=True)
def run_by_numba(operations, count, threads):
    """Run `count` operations from the address `operations` on, in order, each as a parallel loop."""
    for number in range(count):
        operation = operations + number * BYTES
        pieces = min(task_count(operation), PIECES * threads)
        for piece in prange(pieces):
            tasks = task_count(operation)
            first, stop = piece * tasks // pieces, (piece + 1) * tasks // pieces
            call_tasks(read(operation, FUNCTION), read(operation, ARGUMENTS), first, stop)
