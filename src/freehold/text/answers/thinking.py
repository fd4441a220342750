"""Thoughts before an answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from freehold.text.answers.source import Reading, Source
from freehold.text.markers import Markers

_NEWLINES = re.compile(r"\n*")


@dataclass(frozen=True)
class Thinking:
    """A model's markers of thoughts: one of `opens` before, one of `closes` after them. With `is_assumed` an answer
    starts with thoughts even without an opening marker."""

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    is_assumed: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opens + self.closes

    def is_open(self, prompt: str) -> bool:
        """Return whether an answer to this prompt begins inside thoughts."""
        return prompt.rstrip().endswith(self.opens) or (self.is_assumed and not self.is_over(prompt))

    def is_over(self, prompt: str) -> bool:
        """Return whether the prompt ends with complete thoughts: the template was told to disable them."""
        return prompt.rstrip().endswith(self.closes)

    def read(self, source: Source, markers: Markers, is_open: bool) -> Reading[None]:
        """Read thoughts, if any. Newlines around them belong to the markers."""
        opens = tuple(markers.seen(marker) for marker in self.opens)
        closes = tuple(markers.seen(marker) for marker in self.closes)
        if not (yield from source.optional(_behind_space(source, opens))) and not is_open:
            return
        yield from source.run(_NEWLINES)
        if found := (yield from source.until(closes, source.reasoning, "\n")):
            yield from source.run(_NEWLINES)
            yield from source.expect(found)
        source.end_thoughts()
        yield from source.run(_NEWLINES)


def _behind_space(source: Source, markers: tuple[str, ...]) -> Reading[None]:
    yield from source.skip_space()
    yield from source.expect(*markers)


_THINK = ("<think>",), ("</think>",)
THINKING = {
    one.name: one
    for one in (
        Thinking("qwen3", *_THINK),
        Thinking("deepseek_r1", *_THINK, is_assumed=True),
        Thinking("mistral", ("[THINK]",), ("[/THINK]",)),
        Thinking(
            "granite",
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
        ),
    )
}


def thinking_of_template(source: str) -> str | None:
    """Return the name of the thinking format in a chat template; None if it has none."""
    if "<|channel|>" in source:
        return "gpt_oss"
    if "[THINK]" in source:
        return "mistral"
    if "Here is my thought process:" in source:
        return "granite"
    if "</think>" not in source:
        return None
    return "deepseek_r1" if "<｜Assistant｜>" in source else "qwen3"
