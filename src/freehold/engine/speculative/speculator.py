"""Proposing tokens ahead of the model, for it to verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from freehold.contract.arrays import Float32, Int32, Int64
from freehold.contract.step import RowStart
from freehold.engine.device import PageBytes
from freehold.engine.sequences import Sequences, Work


class Speculator(Protocol):
    """Guesses what comes next. Never decides anything: what it proposes is verified by the model, so that a
    bad guess costs time and nothing else.

    A speculator with KV of its own has it in pages of cache groups after the model's (`page_updates[1:]` of
    a step), and reports in `follow` how much of it is written: prefixes are shared only as far as every group
    has them, so a hit never finds the speculator blind. One that works from hidden states (EAGLE) takes
    them from `follow`.
    """

    def start(self, start: RowStart) -> None:
        """A sequence takes a row; its first `start.cached` tokens have their KV."""
        ...

    def update_pages(self, updates: list[tuple[Int32, Int32, Int32]]) -> None:
        """Writes to the page tables of the speculator's groups."""
        ...

    def page_bytes(self) -> Sequence[PageBytes]:
        """How pages of the speculator's groups are copied."""
        ...

    def propose(self, sequences: Sequences, rows: Int64, limits: Int64) -> tuple[Int32, Int64]:
        """At most `limits` [n] tokens to follow each of `rows` [n] -> (tokens int32 [n, k], counts [n])."""
        ...

    def follow(self, sequences: Sequences, work: Work, hidden: Float32, written: Int64) -> Int64:
        """The step is done: `hidden` [tokens of work, features], and the model has KV of the first `written`
        [sequences] tokens -> those of which the speculator has it too."""
        ...

    def warm_up(self) -> float:
        """Compile and measure -> seconds that proposing one token takes."""
        ...
