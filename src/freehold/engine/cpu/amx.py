"""Tile registers of AMX, Intel's Advanced Matrix Extensions, for the intrinsics of this folder (Intel 64 and IA-32
Architectures Software Developer's Manual, volume 1, chapter 18).

There are eight registers of up to 16 rows of 64 bytes. A product adds to a register of 16 x 16 numbers of 32 bits. Rows
of the left factor hold consecutive columns; rows of the right factor hold four bytes, or two bfloat16, of each of 16
columns. Each result depends only on its own row and column. A product takes as many cycles as the left factor has rows.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from freehold.engine.cpu.vectors import I8, I64, call

TILE = 16  # rows of a register
REGISTERS = 8
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # x86-64 Linux


@cache
def permitted() -> bool:
    """Request the registers from the kernel, which saves them only for processes that ask. Return whether this process,
    with all its threads, may use them."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def configure(builder, shapes: Sequence[tuple[Any, int]]) -> None:
    """Set each register's rows, a number or an LLVM integer, and bytes per row. All become zero. `release` must
    follow."""
    assert len(shapes) <= REGISTERS
    room = cgutils.alloca_once(builder, ir.ArrayType(I8, 64), zfill=True)
    where = builder.bitcast(room, I8.as_pointer())

    def put(value, at: int) -> None:
        byte = ir.Constant(I8, value) if isinstance(value, int) else builder.trunc(value, I8)
        builder.store(byte, builder.gep(where, [ir.Constant(I64, at)]))

    put(1, 0)
    for register, (rows, width) in enumerate(shapes):
        put(width, 16 + 2 * register)
        put(rows, 48 + register)
    call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [where])


def release(builder) -> None:
    """Clear all registers, so that the kernel need not save them."""
    call(builder, "llvm.x86.tilerelease", ir.VoidType(), [])


def _number(register: int) -> ir.Constant:
    return ir.Constant(I8, register)


def clear(builder, register: int) -> None:
    call(builder, "llvm.x86.tilezero", ir.VoidType(), [_number(register)])


def load(builder, register: int, where, stride) -> None:
    """Load rows that are `stride` bytes apart, from a pointer."""
    arguments = [_number(register), builder.bitcast(where, I8.as_pointer()), _as_int(stride)]
    call(builder, "llvm.x86.tileloadd64", ir.VoidType(), arguments)


def store(builder, register: int, where, stride) -> None:
    arguments = [_number(register), builder.bitcast(where, I8.as_pointer()), _as_int(stride)]
    call(builder, "llvm.x86.tilestored64", ir.VoidType(), arguments)


def add_product(builder, kind: str, to: int, left: int, right: int) -> None:
    """Add left x right to register `to`. `kind` ssd: signed bytes; usd: unsigned left bytes; f16ps: bfloat16."""
    call(builder, f"llvm.x86.tdpb{kind}", ir.VoidType(), [_number(register) for register in (to, left, right)])


def _as_int(stride):
    return ir.Constant(I64, stride) if isinstance(stride, int) else stride
