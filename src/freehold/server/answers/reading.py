"""Incremental parsing of a job's outputs."""

from __future__ import annotations

from dataclasses import replace

from freehold.ipc.streams import Delta
from freehold.text.answers.events import Content
from freehold.text.answers.parser import AnswerParser, ExpectedAnswer


class OutputReader:
    """Parses one output. `expected` is None if all of it is content; call ids derive from `name`."""

    def __init__(self, expected: ExpectedAnswer | None, name: str):
        self._parser: AnswerParser | None = None if expected is None else expected.parser(name)
        self._ends: list[int] = []

    def read(self, delta: Delta) -> Delta:
        """Return the delta with its parsed events, and at the end the count of reasoning tokens."""
        if self._parser is None:
            return replace(delta, events=[Content(delta.text)] if delta.text else [])
        self._ends += delta.ends
        events = self._parser.add(delta.text)
        if delta.ended is None:
            return replace(delta, events=events)
        events += self._parser.finish()
        thoughts = sum(end <= self._parser.thoughts_end for end in self._ends) if self._parser.thoughts_end else 0
        return replace(delta, events=events, reasoning_tokens=thoughts)
