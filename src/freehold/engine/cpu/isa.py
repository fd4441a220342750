"""Instruction sets for products of integers, and which of them this processor has.

Sums inside a block are exact integers, so all sets give the same bits. They differ in how many lanes a register has and
in how few instructions a product is.
"""

from __future__ import annotations

import platform
from typing import NamedTuple

import llvmlite.binding as llvm

from freehold.engine.cpu.amx import permitted

AUTO = "auto"


# Compiled code is made for the type, so that kernels of several sets can be there at once.
class Portable(NamedTuple):
    """Whatever LLVM makes of the arithmetic."""

    lanes: int = 8
    tile: int = 0


class Avx2(NamedTuple):
    lanes: int = 8
    tile: int = 0


class AvxVnni(NamedTuple):
    """256 bits; a product and its sum are one instruction."""

    lanes: int = 8
    tile: int = 0


class Avx512Vnni(NamedTuple):
    """The same with 512 bits."""

    lanes: int = 16
    tile: int = 0


class Avx512Bf16(NamedTuple):
    """The same, and products of pairs of bfloat16."""

    lanes: int = 16
    tile: int = 0


class Neon(NamedTuple):
    """Arm's 128 bits, in pairs; a product of bytes and its sum are one instruction."""

    lanes: int = 8
    tile: int = 0


class Amx(NamedTuple):
    """The same, and registers of 16 rows of inputs for where there are as many."""

    lanes: int = 16
    tile: int = 16  # rows of inputs in a register


WITH_VNNI = (AvxVnni, Avx512Vnni, Avx512Bf16, Amx)
Isa = Portable | Neon | Avx2 | AvxVnni | Avx512Vnni | Avx512Bf16 | Amx
ISAS: dict[str, Isa] = {
    "portable": Portable(), "neon": Neon(), "avx2": Avx2(), "avx-vnni": AvxVnni(), "avx512-vnni": Avx512Vnni(),
    "avx512-bf16": Avx512Bf16(), "amx": Amx(),
}  # fmt: skip
_NEEDS = {
    "portable": [()],
    "neon": [("dotprod",)],
    "avx2": [("avx2",)],
    "avx-vnni": [("avxvnni",), ("avx512vnni", "avx512vl")],
    "avx512-vnni": [("avx512vnni", "avx512bw", "avx512vl")],
    "avx512-bf16": [("avx512vnni", "avx512bw", "avx512vl", "avx512bf16")],
    "amx": [("avx512vnni", "avx512bw", "avx512vl", "avx512bf16", "amx-tile", "amx-int8", "amx-bf16")],
}


def available() -> list[str]:
    """The sets that this processor has, the best last."""
    has = llvm.get_host_cpu_features()
    there = [name for name, ways in _NEEDS.items() if any(all(has.get(one) for one in way) for way in ways)]
    return [name for name in there if name != "amx" or permitted()]


def of_integers(isa: Isa) -> Isa:
    """What products of integers are compiled for: sets that differ in attention alone share theirs."""
    return Avx512Vnni() if isinstance(isa, Avx512Bf16) else isa


def of_attention(isa: Isa) -> Isa:
    """What attention is compiled for: sets that differ in products of integers alone share it."""
    return isa if isinstance(isa, Amx | Avx512Bf16) else Portable()


def integer_sets() -> dict[str, Isa]:
    """The sets that this processor has and that have products of integers of their own, the best last."""
    return {name: ISAS[name] for name in available() if of_integers(ISAS[name]) is ISAS[name]}


def choose(name: str = AUTO) -> str:
    """The best set, or the one that is named. Raises ValueError if the processor lacks it, RuntimeError if it lacks
    what all of them need."""
    if platform.machine() == "x86_64" and not llvm.get_host_cpu_features().get("f16c"):
        raise RuntimeError("this processor lacks F16C: Freehold needs one of 2013 or later")
    there = available()
    if name == AUTO:
        return there[-1]
    if name not in there:
        raise ValueError(f"cpu_isa: this processor has {', '.join(there)}, not {name}")
    return name
