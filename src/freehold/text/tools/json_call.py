"""Calls that are JSON objects: {"name": "f", "arguments": {...}}."""

from __future__ import annotations

import json

from freehold.text.answers.json_text import collected, json_object, text_of
from freehold.text.answers.source import Broken, Reading, Source
from freehold.text.lark import any_of, literal, sequence
from freehold.text.tools.tool import CallGrammar, Tools

SPACE = r"[ \n\t]{0,8}"  # a regular expression
ARGUMENTS = ("arguments", "parameters")


def read_call(source: Source, tools: Tools) -> Reading[None]:
    """Read a call with members in any order, skipping unknown ones. Raises Broken, also for an unknown tool."""
    name, early = "", ""  # `early`: arguments that came before the name
    has_arguments = False
    yield from source.expect("{")
    while True:
        yield from source.skip_space()
        key = yield from text_of(source)
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        if key == "name" and not name:
            name = yield from text_of(source)
            if name not in tools:
                raise Broken
            if early:
                source.start_call(name)
                source.arguments(early)
        elif key in ARGUMENTS and not has_arguments:
            has_arguments = True
            if name:
                yield from read_arguments(source, name)
            else:
                parts: list[str] = []
                yield from json_object(source, parts.append)
                early = "".join(parts)
        else:
            yield from collected(source)
        yield from source.skip_space()
        if (yield from source.expect(",", "}")) == "}":
            break
    if not name:
        raise Broken
    if not has_arguments:
        source.start_call(name)
        source.arguments("{}")


def read_arguments(source: Source, name: str) -> Reading[None]:
    """Start a call at its arguments, and read them. Raises Broken."""
    if (yield from source.peek()) != "{":
        raise Broken
    source.start_call(name)
    yield from json_object(source, source.arguments)


def call_rule(asked: CallGrammar, key: str = "arguments") -> str:
    """Return the rule `call` in Lark for such an object."""
    heads = (f'{{"name": {json.dumps(tool.name)}, "{key}": ' for tool in asked.tools)
    forms = (
        sequence(literal(head), asked.arguments(tool), literal("}"))
        for head, tool in zip(heads, asked.tools, strict=True)
    )
    return f"call: {any_of(forms)}"


def loose_call_rule(asked: CallGrammar, name: str, key: str = "arguments", before: str = "") -> str:
    """Return the same as a rule called `name`, with optional JSON space, after the regular expression `before`.
    Everything up to the arguments is one expression: a lexer that started with free text could not go back."""
    heads = (
        SPACE.join((before + r"\{", '"name"', ":", json.dumps(tool.name).replace(".", r"\."), ",", f'"{key}"', ":", ""))
        for tool in asked.tools
    )
    forms = (
        sequence(f"/{head}/", asked.arguments(tool), rf"/{SPACE}\}}/")
        for head, tool in zip(heads, asked.tools, strict=True)
    )
    return f"{name}: {any_of(forms)}"
