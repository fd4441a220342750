"""Qwen3-Coder, Qwen3.5: tags around the function and each parameter, with raw values."""

from __future__ import annotations

import json
import re
from typing import Any

from freehold.text.answers.source import Broken, Reading, Source
from freehold.text.lark import any_of, literal, sequence
from freehold.text.markers import Markers
from freehold.text.tools.hermes import BEGIN, END, tagged_calls
from freehold.text.tools.tool import CallGrammar, Tool, Tools, plain_call_id

FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"
_NAME = re.compile(r"[^<>\s]*")


class Qwen3Coder:
    """`<tool_call>\\n<function=f>\\n<parameter=k>\\nv\\n</parameter>\\n</function>\\n</tool_call>`"""

    name = "qwen3_coder"
    markers = (BEGIN, END)
    call_id = staticmethod(plain_call_id)

    def read(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        yield from source.calls_behind(markers.seen(BEGIN), lambda: self._call(source, tools, markers))

    def _call(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        yield from source.expect("<function=")
        name = yield from source.run(_NAME)
        yield from source.expect(">")
        if name not in tools:
            raise Broken
        source.start_call(name)
        before = "{"
        while True:
            yield from source.skip_space()
            if (yield from source.expect("<parameter=", FUNCTION_END)) == FUNCTION_END:
                break
            key = yield from source.run(_NAME)
            yield from source.expect(">")
            source.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            yield from _value(source, _type_of(tools[name], key))
        source.arguments("{}" if before == "{" else "}")
        yield from source.skip_space()
        yield from source.expect(markers.seen(END))

    def grammar(self, asked: CallGrammar) -> list[str]:
        forms = (_form(tool, asked) for tool in asked.tools)
        return [
            *asked.behind_text(BEGIN), tagged_calls(asked), f"call: {any_of(forms)}",
            r"value[lazy]: /(.|\n)*<\/parameter>/",
        ]  # fmt: skip


def _value(source: Source, kind: str) -> Reading[None]:
    """Read a value without one newline on each side. Strings are said as they arrive."""
    yield from source.accept("\n")
    parts: list[str] = []
    say = (lambda text: source.arguments(_escaped(text))) if kind == "string" else parts.append
    if kind == "string":
        source.arguments('"')
    # Trailing newlines are held back; all but the last belong to the value.
    found = yield from source.until((PARAMETER_END,), say, "\n")
    if not found:
        raise Broken
    newlines = yield from source.run(_NEWLINES)
    say(newlines[:-1])
    yield from source.expect(PARAMETER_END)
    source.arguments('"' if kind == "string" else _as_json("".join(parts)))


_NEWLINES = re.compile(r"\n*")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    """Return a value of unknown or non-string type as JSON; invalid JSON becomes a string."""
    literals = {"true": "true", "false": "false", "none": "null", "null": "null"}
    if (word := literals.get(text.strip().lower())) is not None:
        return word
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _type_of(tool: Tool, key: str) -> str:
    schema: Any = tool.properties.get(key)
    kind: Any = schema.get("type") if isinstance(schema, dict) else None  # pyright: ignore
    return kind if isinstance(kind, str) else ""


def _form(tool: Tool, asked: CallGrammar) -> str:
    required: Any = tool.parameters.get("required")
    needed = required if isinstance(required, list) else []  # pyright: ignore[reportUnknownVariableType]
    parts: list[str] = []
    for key, schema in tool.properties.items():
        value = "value" if _type_of(tool, key) in ("string", "") else f'{asked.json(schema, True)} "\\n{PARAMETER_END}"'
        if isinstance(schema, dict) and isinstance(schema.get("enum"), list) and _type_of(tool, key) == "string":  # pyright: ignore
            value = any_of(literal(f"{one}\n{PARAMETER_END}") for one in schema["enum"])  # pyright: ignore
        part = sequence(literal(f"<parameter={key}>\n"), value, literal("\n"))
        parts.append(part if key in needed else f"({part})?")
    return sequence(literal(f"<function={tool.name}>\n"), *parts, literal(FUNCTION_END))
