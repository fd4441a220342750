"""A bug to plant: what it is, and the class of bugs that it stands for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` occurs exactly once in `file`, and `new` takes its place; the runner says so if the source has moved on."""

    name: str
    kind: str
    file: str
    old: str
    new: str
    isa: str = "portable"  # the instruction set that shows it
