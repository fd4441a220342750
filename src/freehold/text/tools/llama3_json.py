"""Llama 3.1 to 3.3: the whole answer is JSON objects, optionally after <|python_tag|>."""

from __future__ import annotations

from freehold.text.answers.source import Reading, Source
from freehold.text.lark import literal
from freehold.text.markers import Markers
from freehold.text.tools.json_call import call_rule, loose_call_rule, read_call
from freehold.text.tools.tool import CallGrammar, Tools, plain_call_id

TAG = "<|python_tag|>"


class Llama3Json:
    """`{"name": "f", "parameters": {...}}`, with `;` between calls."""

    name = "llama3_json"
    markers = (TAG,)
    call_id = staticmethod(plain_call_id)

    def read(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        yield from source.attempt(self._calls(source, tools, markers), 0)
        yield from source.until((), source.content)

    def _calls(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        yield from source.skip_space()
        yield from source.accept(markers.seen(TAG))
        while True:
            yield from source.skip_space()
            yield from read_call(source, tools)
            yield from source.skip_space()
            if not (yield from source.accept(";")):
                return

    def grammar(self, asked: CallGrammar) -> list[str]:
        calls = asked.repeated("call", literal("; "))
        tag = asked.marker(TAG)
        key = "parameters"
        call = call_rule(asked, key) if asked.is_required else loose_call_rule(asked, "call", key)
        return [*asked.at_start(f"calls | {tag} calls", r"\s*\{\s*\"name\""), f"calls: {calls}", call]
