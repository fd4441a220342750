"""Hermes: each call is a JSON object between tags. Qwen 2.5 and 3, Hermes, SmolLM3, and models without tool support."""

from __future__ import annotations

from freehold.text.answers.source import Reading, Source
from freehold.text.lark import literal
from freehold.text.markers import Markers
from freehold.text.tools.json_call import call_rule, read_call
from freehold.text.tools.tool import CallGrammar, Tools, plain_call_id

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes:
    """`<tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>`"""

    name = "hermes"
    markers = (BEGIN, END)
    call_id = staticmethod(plain_call_id)

    def read(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        yield from source.calls_behind(markers.seen(BEGIN), lambda: self._read_call(source, tools, markers))

    def _read_call(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        yield from read_call(source, tools)
        yield from source.skip_space()
        yield from source.expect(markers.seen(END))

    def grammar(self, asked: CallGrammar) -> list[str]:
        return [*asked.behind_text(BEGIN), *self.calls(asked)]

    def calls(self, asked: CallGrammar) -> list[str]:
        """Return the rules `calls`, from after the first tag, and `call`."""
        return [tagged_calls(asked), call_rule(asked)]


def tagged_calls(asked: CallGrammar) -> str:
    """Return the rule `calls`, from after the first tag: the rule `call` on separate lines between tags."""
    newline = literal("\n")
    body = f"{newline} call {newline} {asked.marker(END)}"
    rest = f" ({newline} {asked.marker(BEGIN)} {body})*" if asked.several else ""
    return f"calls: {body}{rest}"
