"""Incremental JSON parsing."""

from __future__ import annotations

import json
import re

from freehold.text.answers.source import Broken, Reading, Say, Source

_SPACE = re.compile(r"[ \n\r\t]*")
_LETTERS = re.compile(r'[^"\\\ud800-\udfff]*')  # of a string
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_LENGTH_MAX = 6
_WORD = re.compile(r"[-+.\w]*")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null")
_CLOSING = {"{": "}", "[": "]"}


def json_object(source: Source, say: Say) -> Reading[None]:
    """Read an object, passing its text to `say` as it arrives. Raises Broken if it is invalid or incomplete."""
    if (yield from source.peek()) != "{":
        raise Broken
    yield from json_value(source, say)


def json_value(source: Source, say: Say) -> Reading[None]:
    """Read a value, passing its text to `say` as it arrives. Raises Broken."""
    closings: list[str] = []
    while True:
        yield from _value_or_opening(source, say, closings)
        while closings:  # after a value
            yield from _space(source, say)
            mark = yield from source.expect(closings[-1], ",")
            say(mark)
            if mark == ",":
                yield from _space(source, say)
                if closings[-1] == "}":
                    yield from _key(source, say)
                break
            closings.pop()
        if not closings:
            return


def _value_or_opening(source: Source, say: Say, closings: list[str]) -> Reading[None]:
    """Read up to the end of the first scalar, empty object or empty list."""
    while True:
        yield from _space(source, say)
        char = yield from source.peek()
        if char == '"':
            return (yield from json_string(source, say))
        if char not in _CLOSING:
            return (yield from _scalar(source, say))
        source.at += 1
        say(char)
        yield from _space(source, say)
        if (yield from source.accept(_CLOSING[char])):
            return say(_CLOSING[char])
        closings.append(_CLOSING[char])
        if char == "{":
            yield from _key(source, say)


def _key(source: Source, say: Say) -> Reading[None]:
    yield from json_string(source, say)
    yield from _space(source, say)
    say((yield from source.expect(":")))


def json_string(source: Source, say: Say) -> Reading[None]:
    """Read a string, keeping quotes and escapes. Raises Broken."""
    say((yield from source.expect('"')))
    while True:
        found = _LETTERS.match(source.text, source.at)
        assert found is not None
        source.at = found.end()
        say(found[0])
        char = yield from source.peek()
        if char == '"':
            source.at += 1
            return say(char)
        if char == "\\":
            say((yield from _escape(source)))
        elif char == "" or "\ud800" <= char <= "\udfff":
            raise Broken


def _escape(source: Source) -> Reading[str]:
    while (found := _ESCAPE.match(source.text, source.at)) is None:
        if source.is_complete or len(source.text) - source.at >= _ESCAPE_LENGTH_MAX:
            raise Broken
        yield
    source.at = found.end()
    return found[0]


def _scalar(source: Source, say: Say) -> Reading[None]:
    word = yield from source.run(_WORD)
    if not _SCALAR.fullmatch(word):
        source.at -= len(word)
        raise Broken
    say(word)


def _space(source: Source, say: Say) -> Reading[None]:
    say((yield from source.run(_SPACE)))


def collected(source: Source) -> Reading[str]:
    """Read a value and return its text. Raises Broken."""
    parts: list[str] = []
    yield from json_value(source, parts.append)
    return "".join(parts)


def text_of(source: Source) -> Reading[str]:
    """Read a string and return its decoded value. Raises Broken."""
    parts: list[str] = []
    yield from json_string(source, parts.append)
    return json.loads("".join(parts), strict=False)
