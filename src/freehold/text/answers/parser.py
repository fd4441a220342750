"""From the text of an output to what it says: thoughts, content, calls of tools."""

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
    """How a model writes answers. `thinking` is None if it has no thoughts to tell apart."""

    tools: ToolFormat
    thinking: Thinking | None
    markers: Markers

    @property
    def has_channels(self) -> bool:
        """Whether nothing of an answer can be read without its format."""
        return isinstance(self.tools, GptOss)

    def expecting(self, tools: Tools, prompt: str, separates_thoughts: bool = True) -> ExpectedAnswer | None:
        """How to read an answer to this prompt; None if all of it is content."""
        if not tools and not self.has_channels and (self.thinking is None or not separates_thoughts):
            return None
        is_open = self.thinking is not None and self.thinking.is_open(prompt)
        return ExpectedAnswer(self, tools, is_open, separates_thoughts)


@dataclass(frozen=True)
class ExpectedAnswer:
    """What an answer may call, and whether it begins inside thoughts."""

    format: AnswerFormat
    tools: Tools
    begins_in_thoughts: bool = False
    separates_thoughts: bool = True

    @property
    def marks(self) -> dict[int, str]:
        """For the detokenizer: what to put for tokens that are markers."""
        thinking = self.format.thinking
        markers = self.format.tools.markers + (() if thinking is None else thinking.markers)
        return self.format.markers.marks(markers)

    def parser(self, name: str) -> AnswerParser:
        """For one output. Ids of calls are made of its `name`."""
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
    """Reads one output. What all of it says does not depend on the pieces in which it came."""

    def __init__(self, expected: ExpectedAnswer, name: str):
        call_id = expected.format.tools.call_id
        self._source = Source(lambda index: call_id(hashlib.sha256(f"{name}/{index}".encode()).hexdigest()))
        self._reading = expected.read(self._source)
        self._shown = expected.format.markers.shown
        next(self._reading, None)

    @property
    def thoughts_end(self) -> int:
        """How many characters of the text were thoughts, with what sets them apart. Known when they have ended."""
        return self._source.thoughts_end

    def add(self, text: str) -> list[Event]:
        """-> what is certain now."""
        if not text:
            return []
        self._source.add(text)
        next(self._reading, None)
        return self._take()

    def finish(self) -> list[Event]:
        """The output is complete."""
        self._source.is_complete = True
        next(self._reading, None)
        return self._take()

    def _take(self) -> list[Event]:
        return [
            one if isinstance(one, CallStart) else replace(one, text=self._shown(one.text))
            for one in self._source.take()
        ]
