"""Tools, and the interface of call formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from freehold.text.answers.source import Reading, Source
from freehold.text.lark import ANYTHING
from freehold.text.markers import Markers


@dataclass(frozen=True)
class Tool:
    """A tool offered by a client. `parameters` is its arguments' JSON schema. Voluntary calls follow it only if the
    tool `is_strict`, required calls always."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    is_strict: bool = False

    @property
    def properties(self) -> dict[str, Any]:
        found = self.parameters.get("properties")
        return found if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownVariableType]


Tools = Mapping[str, Tool]  # by name
OfSchema = Callable[[dict[str, Any], bool], str]  # Lark of a schema; whether to ignore unsupported keywords


@dataclass(frozen=True)
class CallGrammar:
    """The calls of `tools` that an answer may contain, one or `several`. Unless required, the answer may be text
    instead, or text before them if the format allows it."""

    tools: Sequence[Tool]
    several: bool
    is_required: bool
    json: OfSchema
    markers: Markers

    def arguments(self, tool: Tool) -> str:
        """Return the arguments' grammar in Lark, as JSON. Voluntary calls may have any object, unless the tool is
        strict."""
        follows = self.is_required or tool.is_strict
        return self.json({"type": "object", **(tool.parameters if follows else {})}, not tool.is_strict)

    def marker(self, text: str) -> str:
        """Return the marker in Lark."""
        return self.markers.in_grammar(text)

    def behind_text(self, trigger: str, text: str = ANYTHING) -> list[str]:
        """Return lines with a rule `answer`: the rule `calls` after the marker `trigger`, or free text in which the
        marker begins calls. `text`: the terminal's expression of free text."""
        begin = self.marker(trigger)
        if self.is_required:
            return [f"answer: {begin} calls"]
        lines = ["answer: TEXT | to_calls calls", f"TEXT: {text}"]
        is_token = begin.startswith("<[")
        return [*lines, f"to_calls: TEXT {begin}" if is_token else f"to_calls[lazy]: TEXT {begin}"]

    def at_start(self, calls: str, begin: str) -> list[str]:
        """Return lines with a rule `answer`: `calls`, or free text that does not begin like calls, which the regular
        expression `begin` matches."""
        if self.is_required:
            return [f"answer: {calls}"]
        return [f"answer: OTHER | {calls}", f"OTHER: {ANYTHING} & ~/{begin}(.|\\n)*/"]

    def repeated(self, first: str, between: str) -> str:
        """Return an expression for a list of `first` separated by `between`, or for a single one."""
        return f"{first} ({between} {first})*" if self.several else first


def plain_call_id(digest: str) -> str:
    """Return a call id as OpenAI writes them."""
    return f"call_{digest[:24]}"


class ToolFormat(Protocol):
    """A model's call format. Parser and grammar accept the same text.

    `name`: its name for `--tool-call-parser`. `markers`: those that it looks for.
    """

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    def call_id(self, digest: str) -> str:
        """Return a call id, from a unique digest of 64 hexadecimal digits."""
        ...

    def read(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        """Read the whole answer: calls of `tools`, and the text beside them."""
        ...

    def grammar(self, asked: CallGrammar) -> list[str]:
        """Return lines of Lark with a rule `answer`."""
        ...
