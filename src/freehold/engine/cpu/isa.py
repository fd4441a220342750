"""Instruction sets for integer products, and their detection.

Sums inside a block are exact integers, so all sets give the same bits. They differ in lanes per register and
instructions per product.
"""

from __future__ import annotations

import platform
from typing import NamedTuple

import llvmlite.binding as llvm

from freehold.engine.cpu.amx import permitted

AUTO = "auto"


# Code is compiled per type, so that kernels of several sets can coexist.
class Portable(NamedTuple):
    """Plain arithmetic, compiled by LLVM."""

    lanes: int = 8
    tile: int = 0


class Avx2(NamedTuple):
    lanes: int = 8
    tile: int = 0


class AvxVnni(NamedTuple):
    """256 bits, with a fused product and sum."""

    lanes: int = 8
    tile: int = 0


class Avx512Vnni(NamedTuple):
    """The same with 512 bits."""

    lanes: int = 16
    tile: int = 0


class Avx512Bf16(NamedTuple):
    """The same, with products of bfloat16 pairs."""

    lanes: int = 16
    tile: int = 0


class Neon(NamedTuple):
    """Arm's 128 bits, in pairs, with a fused byte product and sum."""

    lanes: int = 8
    tile: int = 0


class Amx(NamedTuple):
    """The same, with tile registers of 16 rows of inputs."""

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
    """Return the sets of this processor, best last."""
    has = llvm.get_host_cpu_features()
    there = [name for name, ways in _NEEDS.items() if any(all(has.get(one) for one in way) for way in ways)]
    return [name for name in there if name != "amx" or permitted()]


def of_integers(isa: Isa) -> Isa:
    """Return the set for integer products: sets that differ only in attention share kernels."""
    return Avx512Vnni() if isinstance(isa, Avx512Bf16) else isa


def of_attention(isa: Isa) -> Isa:
    """Return the set for attention: sets that differ only in integer products share kernels."""
    return isa if isinstance(isa, Amx | Avx512Bf16) else Portable()


def integer_sets() -> dict[str, Isa]:
    """Return this processor's sets with distinct integer products, best last."""
    return {name: ISAS[name] for name in available() if of_integers(ISAS[name]) is ISAS[name]}


def choose(name: str = AUTO) -> str:
    """Return the best set, or the named one. Raises ValueError if the processor lacks it, RuntimeError if it lacks the
    baseline."""
    if platform.machine() == "x86_64" and not llvm.get_host_cpu_features().get("f16c"):
        raise RuntimeError("this processor lacks F16C: Freehold needs one of 2013 or later")
    there = available()
    if name == AUTO:
        return there[-1]
    if name not in there:
        raise ValueError(f"cpu_isa: this processor has {', '.join(there)}, not {name}")
    return name
