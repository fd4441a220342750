"""Proposes tokens for the model to verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from freehold.contract.arrays import Float32, Int32, Int64
from freehold.contract.step import RowStart
from freehold.engine.device import PageBytes
from freehold.engine.sequences import Sequences, Work


class Speculator(Protocol):
    """Guesses the next tokens. The model verifies each, so that a bad guess costs only time.

    A speculator with its own KV keeps it in pages of cache groups after the model's (`page_updates[1:]` of a step), and
    reports in `follow` how much is written: prefixes are shared only as far as every group has them, so that a hit
    always includes the speculator's KV. One that uses hidden states (EAGLE) takes them from `follow`.
    """

    def start(self, start: RowStart) -> None:
        """Assign a row to a sequence; its first `start.cached` tokens have their KV."""
        ...

    def update_pages(self, updates: list[tuple[Int32, Int32, Int32]]) -> None:
        """Update the page tables of the speculator's groups."""
        ...

    def page_bytes(self) -> Sequence[PageBytes]:
        """Return the page copiers of the speculator's groups."""
        ...

    def propose(self, sequences: Sequences, rows: Int64, limits: Int64) -> tuple[Int32, Int64]:
        """Propose at most `limits` [n] tokens after each of `rows` [n] -> (tokens int32 [n, k], counts [n])."""
        ...

    def follow(self, sequences: Sequences, work: Work, hidden: Float32, written: Int64) -> Int64:
        """Follow a completed step, with `hidden` [tokens of work, features] and the model's KV of the first `written`
        [sequences] tokens. Return how many of these the speculator has too."""
        ...

    def warm_up(self) -> float:
        """Compile and measure. Return the seconds to propose one token."""
        ...
