"""Calls as a Python list: Llama 4 and 3.2, OLMo 3."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from freehold.text.answers.source import Broken, Reading, Source
from freehold.text.lark import any_of, literal
from freehold.text.markers import Markers
from freehold.text.tools.tool import CallGrammar, Tool, Tools, plain_call_id

_NAME = re.compile(r"[\w.-]*")
_PLAIN = re.compile(r"[^\"'\\\[\](){},]*")  # of a value, outside strings
_QUOTED = {quote: re.compile(rf"(?:[^{quote}\\])*") for quote in "\"'"}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_BEGIN = r"\s*\[\s*[A-Za-z_][\w.-]*\("


class Pythonic:
    """`[f(a=1), g(b="x")]`, the whole answer."""

    name = "pythonic"
    markers = ()
    call_id = staticmethod(plain_call_id)

    def read(self, source: Source, tools: Tools, markers: Markers) -> Reading[None]:
        yield from source.attempt(self._calls(source, tools), 0)
        yield from source.until((), source.content)

    def _calls(self, source: Source, tools: Tools) -> Reading[None]:
        yield from source.skip_space()
        yield from source.expect("[")
        while True:
            yield from source.skip_space()
            name = yield from source.run(_NAME)
            yield from source.expect("(")
            if name not in tools:
                raise Broken
            source.start_call(name)
            yield from self._arguments(source)
            yield from source.skip_space()
            if (yield from source.expect(",", "]")) == "]":
                return (yield from source.skip_space())

    def _arguments(self, source: Source) -> Reading[None]:
        yield from source.skip_space()
        if (yield from source.accept(")")):
            return source.arguments("{}")
        before = "{"
        while True:
            yield from source.skip_space()
            key = yield from source.run(_NAME)
            yield from source.skip_space()
            yield from source.expect("=")
            value = yield from _value(source)
            source.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: {value}")
            before = ", "
            if (yield from source.expect(",", ")")) == ")":
                return source.arguments("}")

    def grammar(self, asked: CallGrammar) -> list[str]:
        # The bracket and the first name are one literal: a lexer that started with free text could not go back.
        first, call = (any_of(_form(tool, before) for tool in asked.tools) for before in ("[", ""))
        others = f"({literal(', ')} call)*" if asked.several else ""
        return [*asked.at_start("calls", _BEGIN), f"calls: first {others} {literal(']')}", f"first: {first}",
                f"call: {call}", *_VALUES]  # fmt: skip


_VALUES = [
    'value: TEXT_VALUE | NUMBER | INTEGER | TRUTH | "None" | list | dict',
    'list: "[" (value (", " value)*)? "]"',
    'dict: "{" (TEXT_VALUE ": " value (", " TEXT_VALUE ": " value)*)? "}"',
    r'TEXT_VALUE: /"([^"\\\x00-\x1f]|\\["\\nrt])*"/',
    r"INTEGER: /-?(0|[1-9][0-9]{0,17})/",
    r"NUMBER: /-?(0|[1-9][0-9]{0,17})\.[0-9]{1,17}/",
    'TRUTH: "True" | "False"',
]
_KINDS = {
    "string": "TEXT_VALUE", "integer": "INTEGER", "number": "(INTEGER | NUMBER)", "boolean": "TRUTH", "array": "list",
    "object": "dict", "null": '"None"',
}  # fmt: skip


def _value(source: Source) -> Reading[str]:
    """Read a Python literal up to the next comma or bracket and return it as JSON. Raises Broken."""
    parts: list[str] = []
    closings: list[str] = []
    while True:
        parts.append((yield from source.run(_PLAIN)))
        char = yield from source.peek()
        if not closings and char in (",", ")"):
            break
        if char in ("'", '"'):
            parts.append((yield from _quoted(source, char)))
            continue
        if char in _CLOSING:
            closings.append(_CLOSING[char])
        elif char == "," and closings:
            pass
        elif not closings or char != closings.pop():
            raise Broken
        source.at += 1
        parts.append(char)
    try:
        return json.dumps(ast.literal_eval("".join(parts).strip()), ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise Broken from None


def _quoted(source: Source, quote: str) -> Reading[str]:
    source.at += 1
    parts = [quote]
    while True:
        parts.append((yield from source.run(_QUOTED[quote])))
        char = yield from source.peek()
        if not char:
            raise Broken
        source.at += 1
        parts.append(char)
        if char == quote:
            return "".join(parts)
        parts.append((yield from source.peek()))  # after a backslash
        source.at += 1


def _form(tool: Tool, before: str) -> str:
    """Return the grammar of a call, after `before`. Arguments are in schema order, and optional ones may be missing."""
    required: Any = tool.parameters.get("required")
    needed = [key for key in tool.properties if isinstance(required, list) and key in required]
    others = [key for key in tool.properties if key not in needed]
    parts = [_argument(key, tool.properties[key]) for key in needed]
    comma = literal(", ")
    whole = f" {comma} ".join(parts)
    if parts:
        whole += "".join(f" ({comma} {_argument(key, tool.properties[key])})?" for key in others)
    elif others:
        # Any argument may be the first, then only those after it.
        firsts = (
            _argument(key, tool.properties[key])
            + "".join(f" ({comma} {_argument(other, tool.properties[other])})?" for other in others[at + 1 :])
            for at, key in enumerate(others)
        )
        whole = f"{any_of(firsts)}?"
    return f"{literal(f'{before}{tool.name}(')} {whole} {literal(')')}"


def _argument(key: str, schema: Any) -> str:
    kind: Any = schema.get("type") if isinstance(schema, dict) else None  # pyright: ignore
    enum: Any = schema.get("enum") if isinstance(schema, dict) else None  # pyright: ignore
    if isinstance(enum, list) and enum:
        value = any_of(literal(repr(one)) for one in enum)  # pyright: ignore
    else:
        value = _KINDS.get(kind, "value") if isinstance(kind, str) else "value"
    return f"{literal(f'{key}=')} {value}"
