"""Qwen2.5-Coder: its template asks for Hermes, but it mostly writes bare or fenced JSON."""

from __future__ import annotations

import json
from typing import Any

from freehold.text.answers.json_text import collected
from freehold.text.answers.source import Broken, Reading, Source
from freehold.text.markers import Markers
from freehold.text.tools.hermes import BEGIN, END, Hermes
from freehold.text.tools.json_call import ARGUMENTS, SPACE, loose_call_rule
from freehold.text.tools.tool import CallGrammar, Tools, plain_call_id

_FENCES = {"```json": "```", "```": "```", "<tools>": "</tools>"}
_BARE = r"\s*((```(json)?|<tools>)\s*)?\{\s*\"name\""  # start of such an answer


class Qwen25Coder:
    """Hermes, or an answer of nothing but calls of known tools, as JSON, fenced or in <tools>."""

    name = "qwen25_coder"
    markers = (BEGIN, END)
    call_id = staticmethod(plain_call_id)

    def __init__(self) -> None:
        self._hermes = Hermes()

    def read(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        found: list[tuple[str, str]] = []
        if (yield from source.optional(_whole(source, tools, found))):
            for name, arguments in found:
                source.start_call(name)
                source.arguments(arguments)
        else:
            yield from self._hermes.read(source, tools, markers)

    def grammar(self, asked: CallGrammar) -> list[str]:
        if asked.is_required:
            return self._hermes.grammar(asked)
        answer, *lines = asked.behind_text(BEGIN, rf"/(.|\n)*/ & ~/{_BARE}(.|\n)*/")
        others = "other*" if asked.several else ""
        return [
            f"{answer} | bare {others} | fenced {others} /{SPACE}```{SPACE}/", *lines, *self._hermes.calls(asked),
            loose_call_rule(asked, "bare"), loose_call_rule(asked, "other", before=SPACE),
            loose_call_rule(asked, "fenced", before=f"```(json)?{SPACE}"),
        ]  # fmt: skip


def _whole(source: Source, tools: Tools, found: list[tuple[str, str]]) -> Reading[None]:
    """Read calls up to the end. Raises Broken for anything else."""
    while True:
        yield from source.skip_space()
        fence = yield from source.accept(*_FENCES)
        yield from source.skip_space()
        while (yield from source.peek()) in ("{", "["):
            found += _calls((yield from collected(source)), tools)
            yield from source.skip_space()
        if not found:
            raise Broken
        if fence:
            yield from source.expect(_FENCES[fence])
            yield from source.skip_space()
        if not (yield from source.peek()):
            return
        if not fence:
            raise Broken


def _calls(text: str, tools: Tools) -> list[tuple[str, str]]:
    """Return each call's name and arguments. Raises Broken."""
    try:
        value: Any = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise Broken from None
    return [_call(one, tools) for one in (value if isinstance(value, list) else [value])]  # pyright: ignore


def _call(value: Any, tools: Tools) -> tuple[str, str]:
    name: Any = value.get("name") if isinstance(value, dict) else None  # pyright: ignore
    if not isinstance(name, str) or name not in tools:
        raise Broken
    arguments: Any = next((value[key] for key in ARGUMENTS if key in value), {})  # pyright: ignore
    if not isinstance(arguments, dict):
        raise Broken
    return name, json.dumps(arguments, ensure_ascii=False)
