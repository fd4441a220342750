"""Mistral: a marker, then a JSON list of calls, or since version 11 of its tokenizer alternating names and
arguments."""

from __future__ import annotations

import re

from freehold.text.answers.source import Broken, Reading, Source
from freehold.text.lark import any_of, literal
from freehold.text.markers import Markers
from freehold.text.tools.json_call import call_rule, read_arguments, read_call
from freehold.text.tools.tool import CallGrammar, Tools

BEGIN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.-]*")


class Mistral:
    """`[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`, or `[TOOL_CALLS]f[ARGS]{...}` for each, in some versions
    with `[CALL_ID]` and an id before the arguments, which we replace."""

    name = "mistral"
    markers = (BEGIN, CALL_ID, ARGUMENTS)

    def call_id(self, digest: str) -> str:
        """Return a short id: Mistral's templates reject others."""
        return digest[:9]

    def read(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        yield from source.calls_behind(markers.seen(BEGIN), lambda: self._calls(source, tools, markers))

    def _calls(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        if (yield from source.accept("[")):
            yield from self._list(source, tools)
        else:
            yield from self._named(source, tools, markers)

    def _list(self, source: Source, tools: Tools) -> Reading[None]:
        while True:
            yield from source.skip_space()
            yield from read_call(source, tools)
            yield from source.skip_space()
            if (yield from source.expect(",", "]")) == "]":
                return

    def _named(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        name = yield from source.run(_NAME)
        named, arguments = markers.seen(CALL_ID), markers.seen(ARGUMENTS)
        if (yield from source.expect(named, arguments)) == named:
            yield from source.run(_NAME)
            yield from source.expect(arguments)
        if name not in tools:
            raise Broken
        yield from read_arguments(source, name)

    def grammar(self, asked: CallGrammar) -> list[str]:
        if ARGUMENTS in asked.markers.tokens:
            forms = (f"{literal(tool.name)} {asked.marker(ARGUMENTS)} {asked.arguments(tool)}" for tool in asked.tools)
            calls = [f"calls: {asked.repeated('call', asked.marker(BEGIN))}", f"call: {any_of(forms)}"]
        else:
            listed = asked.repeated("call", literal(", "))
            calls = [f"calls: {literal(' ')}? {literal('[')} {listed} {literal(']')}", call_rule(asked)]
        return [*asked.behind_text(BEGIN), *calls]
