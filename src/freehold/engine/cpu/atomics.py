"""Atomic words shared by threads, and waiting for one to change. Words are 64 bits, numbered from the start of the
block that `place` registers with the linker. All are Numba intrinsics, only for compiled code."""

from __future__ import annotations

import ctypes

from llvmlite import binding, ir
from numba.core import cgutils, types

from freehold.engine.cpu.vectors import I8, I64, call, intrinsic

BYTES = ir.PointerType(I8)
_BLOCK = "freehold_team_words"
_FUTEX, _WAIT_PRIVATE, _WAKE_PRIVATE = 202, 128, 129  # x86-64; Linux's syscall numbers
_ORDER = "seq_cst"


def place(count: int) -> ctypes.Array[ctypes.c_int64]:
    """Allocate `count` words, all 0, which compiled code finds by name. They must live as long as the process."""
    words = (ctypes.c_int64 * count)()
    binding.add_symbol(_BLOCK, ctypes.addressof(words))
    return words


def _word(builder, number):
    module = builder.module
    block = module.globals.get(_BLOCK)
    if block is None:
        block = ir.GlobalVariable(module, I64, _BLOCK)
        block.linkage = "external"
    return builder.gep(block, [number])


@intrinsic
def get(typingctx, number):
    def codegen(context, builder, signature, values):
        return builder.load_atomic(_word(builder, values[0]), _ORDER, 8)

    return types.int64(types.int64), codegen


@intrinsic
def put(typingctx, number, value):
    def codegen(context, builder, signature, values):
        builder.store_atomic(values[1], _word(builder, values[0]), _ORDER, 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def post(typingctx, number, value):
    """Write like `put`, but with release order: others see it once they see a later `put`."""

    def codegen(context, builder, signature, values):
        builder.store_atomic(values[1], _word(builder, values[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def add(typingctx, number, value):
    """Add to a word. Return its previous value."""

    def codegen(context, builder, signature, values):
        return builder.atomic_rmw("add", _word(builder, values[0]), values[1], _ORDER)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def exchange_if(typingctx, number, expected, value):
    """Write `value` if the word equals `expected`. Return whether it did."""

    def codegen(context, builder, signature, values):
        pair = builder.cmpxchg(_word(builder, values[0]), values[1], values[2], _ORDER, _ORDER)
        return builder.extract_value(pair, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Yield the core to its other hardware thread for some nanoseconds."""

    def codegen(context, builder, signature, values):
        call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


def _futex(builder, number, operation: int, value):
    kind = ir.FunctionType(I64, [I64] * 7)
    syscall = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    where, zero = builder.ptrtoint(_word(builder, number), I64), ir.Constant(I64, 0)
    builder.call(syscall, [ir.Constant(I64, _FUTEX), where, ir.Constant(I64, operation), value, zero, zero, zero])


@intrinsic
def sleep_while(typingctx, number, value):
    """Sleep until the low half of the word changes, a wake-up, or spuriously."""

    def codegen(context, builder, signature, values):
        _futex(builder, values[0], _WAIT_PRIVATE, builder.and_(values[1], ir.Constant(I64, (1 << 32) - 1)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def wake(typingctx, number):
    """Wake all threads that sleep on the word."""

    def codegen(context, builder, signature, values):
        _futex(builder, values[0], _WAKE_PRIVATE, ir.Constant(I64, 1 << 30))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def read(typingctx, address, index):
    """Read the 64-bit number at an index of an array given by address."""

    def codegen(context, builder, signature, values):
        array = builder.inttoptr(values[0], ir.PointerType(I64))
        return builder.load(builder.gep(array, [values[1]]))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def address_of(typingctx, number):
    """Return the address of a word of the block."""

    def codegen(context, builder, signature, values):
        return builder.ptrtoint(_word(builder, values[0]), I64)

    return types.int64(types.int64), codegen


@intrinsic
def call_tasks(typingctx, function, arguments, first, stop):
    """Call a compiled function for tasks `first` up to `stop`. Function and arguments are addresses."""

    def codegen(context, builder, signature, values):
        function, *given = values
        kind = ir.FunctionType(ir.VoidType(), [I64] * 3)
        builder.call(builder.inttoptr(function, kind.as_pointer()), given)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def call_piece(typingctx, function, arguments, sizes, steps, data):
    """Call a piece of a parallel loop compiled by Numba. All arguments are addresses."""

    def codegen(context, builder, signature, values):
        kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(BYTES), ir.PointerType(I64), ir.PointerType(I64), BYTES])
        function, *given = values
        pointers = [builder.inttoptr(one, of) for one, of in zip(given, kind.args, strict=True)]
        builder.call(builder.inttoptr(function, ir.PointerType(kind)), pointers)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen
