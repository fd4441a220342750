"""What an output may look like."""

from __future__ import annotations

from dataclasses import dataclass

GRAMMAR_BYTES_MAX = 256 << 10


@dataclass(frozen=True)
class Constraint:
    """`grammar` is Lark text as llguidance reads it, with a rule `start`; `field` is the client's name for what it was
    made from, for errors."""

    grammar: str
    field: str
