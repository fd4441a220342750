"""Regular expressions and choices as parts of a grammar."""

from __future__ import annotations

import re

from freehold.text.lark import literal

# ASCII only, as in JSON Schema: digits of other scripts don't match.
_CLASSES = {"d": "0-9", "w": "a-zA-Z0-9_", "s": r" \t\n\r\f\v"}
_CLASS_BEGIN = re.compile(r"\[\^?\]?")
_NEWLINES = {"\n": r"\n", "\r": r"\r"}


def regex_grammar(pattern: str) -> str:
    """Return Lark for text that matches a regular expression as a whole. Raises ValueError."""
    if not pattern:
        raise ValueError("must not be empty")
    return f"/{_in_ascii(pattern)}/"


def choice_grammar(choices: list[str]) -> str:
    """Return Lark for one of these texts. Raises ValueError."""
    if not choices or not all(isinstance(one, str) and one for one in choices):  # pyright: ignore
        raise ValueError("must be a list of texts that are not empty")
    return " | ".join(literal(one) for one in choices)


def _in_ascii(pattern: str) -> str:
    """Expand classes, and escape characters that would end a line or the expression."""
    found: list[str] = []
    at, is_in_class = 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\" and at + 1 < len(pattern):
            found.append(_escape(pattern[at + 1], is_in_class))
            at += 2
            continue
        if char == "[" and not is_in_class:
            is_in_class = True
            # A leading bracket is a literal.
            begin = _CLASS_BEGIN.match(pattern, at)
            assert begin is not None
            found.append(begin[0].replace("]", r"\]"))
            at += len(begin[0])
            continue
        if char == "]":
            is_in_class = False
        found.append(r"\[" if char == "[" and is_in_class else r"\/" if char == "/" else _NEWLINES.get(char, char))
        at += 1
    return "".join(found)


def _escape(char: str, is_in_class: bool) -> str:
    chars = _CLASSES.get(char.lower())
    if chars is None:
        return "\\" + _NEWLINES.get(char, char).removeprefix("\\")
    if char.islower():
        return chars if is_in_class else f"[{chars}]"
    if is_in_class:
        raise ValueError(f"\\{char} can't stand inside brackets")
    return f"[^{chars}]"
