"""Parses an output's text into thoughts, content and tool calls."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from freehold.text.answers.events import CallStart, Event
from freehold.text.answers.source import Reading, Source
from freehold.text.answers.thinking import Thinking
from freehold.text.markers import Markers
from freehold.text.tools.gpt_oss import GptOss
from freehold.text.tools.tool import ToolFormat, Tools


@dataclass(frozen=True)
class AnswerFormat:
    """A model's answer format. `thinking` is None if it marks no thoughts."""

    tools: ToolFormat
    thinking: Thinking | None
    markers: Markers

    @property
    def has_channels(self) -> bool:
        """Whether even plain answers need parsing."""
        return isinstance(self.tools, GptOss)

    def expecting(self, tools: Tools, prompt: str, separates_thoughts: bool = True) -> ExpectedAnswer | None:
        """Return how to read an answer to this prompt; None if all of it is content."""
        if not tools and not self.has_channels and (self.thinking is None or not separates_thoughts):
            return None
        is_open = self.thinking is not None and self.thinking.is_open(prompt)
        return ExpectedAnswer(self, tools, is_open, separates_thoughts)


@dataclass(frozen=True)
class ExpectedAnswer:
    """The tools that an answer may call, and whether it begins inside thoughts."""

    format: AnswerFormat
    tools: Tools
    begins_in_thoughts: bool = False
    separates_thoughts: bool = True

    @property
    def marks(self) -> dict[int, str]:
        """Texts for marker tokens, for the detokenizer."""
        thinking = self.format.thinking
        markers = self.format.tools.markers + (() if thinking is None else thinking.markers)
        return self.format.markers.marks(markers)

    def parser(self, name: str) -> AnswerParser:
        """Return a parser of one output. Call ids are derived from its `name`."""
        return AnswerParser(self, name)

    def read(self, source: Source) -> Reading[None]:
        form = self.format
        if form.thinking is not None and self.separates_thoughts:
            yield from form.thinking.read(source, form.markers, self.begins_in_thoughts)
        if self.tools or form.has_channels:
            yield from form.tools.read(source, self.tools, form.markers)
        else:
            yield from source.until((), source.content)


class AnswerParser:
    """Parses one output. The result does not depend on how the text was split."""

    def __init__(self, expected: ExpectedAnswer, name: str):
        call_id = expected.format.tools.call_id
        self._source = Source(lambda index: call_id(hashlib.sha256(f"{name}/{index}".encode()).hexdigest()))
        self._reading = expected.read(self._source)
        self._shown = expected.format.markers.shown
        next(self._reading, None)

    @property
    def thoughts_end(self) -> int:
        """The number of characters of thoughts, markers included. Known once they have ended."""
        return self._source.thoughts_end

    def add(self, text: str) -> list[Event]:
        """Add text. Return the events that are certain now."""
        if not text:
            return []
        self._source.add(text)
        next(self._reading, None)
        return self._take()

    def finish(self) -> list[Event]:
        """Complete the output. Return the last events."""
        self._source.is_complete = True
        next(self._reading, None)
        return self._take()

    def _take(self) -> list[Event]:
        return [
            one if isinstance(one, CallStart) else replace(one, text=self._shown(one.text))
            for one in self._source.take()
        ]
