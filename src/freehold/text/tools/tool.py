"""Tools, and what a format of calls can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from freehold.text.answers.source import Reading, Source
from freehold.text.lark import ANYTHING
from freehold.text.markers import Markers


@dataclass(frozen=True)
class Tool:
    """What a client offers: `parameters` is the JSON schema of the arguments. Where it `is_strict`, calls that the
    model chose to make follow the schema, too, not only those that it had to."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    is_strict: bool = False

    @property
    def properties(self) -> dict[str, Any]:
        found = self.parameters.get("properties")
        return found if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownVariableType]


Tools = Mapping[str, Tool]  # by name
OfSchema = Callable[[dict[str, Any], bool], str]  # Lark for a document of a schema; whether to ignore odd keywords


@dataclass(frozen=True)
class CallGrammar:
    """What an answer may consist of: calls of `tools`, one or `several`. Unless they are `required`, text may stand in
    their place, or before them where the format has that."""

    tools: Sequence[Tool]
    several: bool
    is_required: bool
    json: OfSchema
    markers: Markers

    def arguments(self, tool: Tool) -> str:
        """In Lark, as JSON. A model that calls of its own accord may write any object, unless the tool is strict."""
        follows = self.is_required or tool.is_strict
        return self.json({"type": "object", **(tool.parameters if follows else {})}, not tool.is_strict)

    def marker(self, text: str) -> str:
        """In Lark."""
        return self.markers.in_grammar(text)

    def behind_text(self, trigger: str, text: str = ANYTHING) -> list[str]:
        """Lines with a rule `answer`: the rule `calls` behind the marker `trigger`; or free text, where that marker
        begins calls. `text`: a terminal's expression, what free text is."""
        begin = self.marker(trigger)
        if self.is_required:
            return [f"answer: {begin} calls"]
        lines = ["answer: TEXT | to_calls calls", f"TEXT: {text}"]
        is_token = begin.startswith("<[")
        return [*lines, f"to_calls: TEXT {begin}" if is_token else f"to_calls[lazy]: TEXT {begin}"]

    def at_start(self, calls: str, begin: str) -> list[str]:
        """Lines with a rule `answer`: `calls`, or free text that does not begin like calls. `begin`: a regular
        expression."""
        if self.is_required:
            return [f"answer: {calls}"]
        return [f"answer: OTHER | {calls}", f"OTHER: {ANYTHING} & ~/{begin}(.|\\n)*/"]

    def repeated(self, first: str, between: str) -> str:
        """An expression for a list of `first` with `between` in it, of one if there are not to be several."""
        return f"{first} ({between} {first})*" if self.several else first


def plain_call_id(digest: str) -> str:
    """As OpenAI writes them."""
    return f"call_{digest[:24]}"


class ToolFormat(Protocol):
    """How a model writes calls. What is read and what a grammar allows are one and the same text.

    `name`: what `--tool-call-parser` calls it. `markers`: those that it looks for.
    """

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    def call_id(self, digest: str) -> str:
        """An id for a call, of 64 hexadecimal digits of its own."""
        ...

    def read(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        """The whole answer: calls of `tools`, and what is said beside them."""
        ...

    def grammar(self, asked: CallGrammar) -> list[str]:
        """Lines of Lark with a rule `answer`."""
        ...
