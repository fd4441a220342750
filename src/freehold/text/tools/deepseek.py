"""DeepSeek V3 and V3.1: calls between special tokens."""

from __future__ import annotations

import re

from freehold.text.answers.source import Broken, Reading, Source
from freehold.text.lark import any_of, literal
from freehold.text.markers import Markers
from freehold.text.tools.json_call import read_arguments
from freehold.text.tools.tool import CallGrammar, Tools, plain_call_id

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_NAME = re.compile(r"[\w.-]*")


class DeepSeek:
    """Each call has its name after `kind`, and `before` and `behind` around its arguments."""

    markers = (BEGIN, END, CALL, CALL_END, SEPARATOR)
    call_id = staticmethod(plain_call_id)

    def __init__(self, name: str, kind: str, before: str, behind: str):
        self.name = name
        self._kind = kind
        self._before = before
        self._behind = behind

    def read(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        yield from source.calls_behind(markers.seen(BEGIN), lambda: self._calls(source, tools, markers))

    def _calls(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        while True:
            yield from source.skip_space()
            if (yield from source.expect(markers.seen(CALL), markers.seen(END))) == markers.seen(END):
                return
            yield from self._call(source, tools, markers)

    def _call(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        if self._kind:
            yield from source.expect(self._kind)
            yield from source.expect(markers.seen(SEPARATOR))
        name = yield from source.run(_NAME)
        yield from source.expect(self._before or markers.seen(SEPARATOR))
        yield from source.skip_space()
        if name not in tools:
            raise Broken
        yield from read_arguments(source, name)
        if self._behind:
            yield from source.expect(self._behind)
        yield from source.skip_space()
        yield from source.expect(markers.seen(CALL_END))

    def grammar(self, asked: CallGrammar) -> list[str]:
        separator = asked.marker(SEPARATOR)
        kind = f"{literal(self._kind)} {separator}" if self._kind else ""
        before = literal(self._before) if self._before else separator
        behind = literal(self._behind) if self._behind else ""
        forms = (f"{kind} {literal(tool.name)} {before} {asked.arguments(tool)} {behind}" for tool in asked.tools)
        whole = f"{asked.marker(CALL)} call {asked.marker(CALL_END)}"
        between = literal("\n") if self._kind else ""
        calls = f"{whole} ({between} {whole})*" if asked.several else whole
        return [*asked.behind_text(BEGIN), f"calls: {calls} {asked.marker(END)}", f"call: {any_of(forms)}"]


DEEPSEEK_V3 = DeepSeek("deepseek_v3", "function", "\n```json\n", "\n```")
DEEPSEEK_V31 = DeepSeek("deepseek_v31", "", "", "")
