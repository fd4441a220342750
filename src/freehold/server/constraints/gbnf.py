"""Translates GBNF, the grammars of llama.cpp and xgrammar, to Lark.

A rule is `name ::= alternatives` and extends over any number of lines until the next one. Items are "literals",
[classes], `.`, names and (groups), followed by `*`, `+`, `?`, `{n}` or `{n,m}`. `root` is the start.

Non-recursive rules become terminals, so that each is one regular expression: a lexer that had to choose between its
parts could choose wrongly.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from freehold.text.lark import literal

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
      | (?P<literal>"(?:[^"\\\n]|\\.)*")
      | (?P<class>\[(?:[^\]\\\n]|\\.)*\])
      | (?P<assign>::=)
      | (?P<name>[A-Za-z_][A-Za-z0-9_-]*)
      | (?P<repeat>[*+?]|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
      | (?P<mark>[|().])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t"}
ANYTHING = r"/(.|\n)/"


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int
    column: int

    def refuse(self, why: str) -> NoReturn:
        raise ValueError(f"line {self.line}, column {self.column}: {why}")


_Parts = list[str | _Token]  # a rule in Lark; names are still tokens


def lark_of(source: str) -> str:
    """Return a grammar in Lark, translated from GBNF or unchanged. Raises ValueError with the problem and its
    position."""
    if "::=" in source:
        return _translate(source)
    if re.search(r"^\s*start\s*:", source, re.MULTILINE):
        return source
    raise ValueError("is no grammar: it has neither rules of GBNF (root ::= ...) nor of Lark (start: ...)")


def _translate(source: str) -> str:
    tokens = list(_tokens(source))
    rules: dict[str, _Parts] = {}
    starts = [at for at in range(len(tokens) - 1) if tokens[at].kind == "name" and tokens[at + 1].kind == "assign"]
    if tokens and (not starts or starts[0] != 0):
        tokens[0].refuse("a rule must begin here: name ::= ...")
    for begin, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
        name = tokens[begin]
        if name.text in rules:
            name.refuse(f"there is a rule '{name.text}' already")
        rules[name.text] = _body(tokens[begin + 2 : end])
    if "root" not in rules:
        raise ValueError("has no rule 'root'")
    for parts in rules.values():
        for part in parts:
            if isinstance(part, _Token) and part.text not in rules:
                part.refuse(f"there is no rule '{part.text}'")
    names = _named(rules)
    lines = [f"start: {names['root']}"]
    for name, parts in rules.items():
        written = (names[part.text] if isinstance(part, _Token) else part for part in parts)
        lines.append(f"{names[name]}: {' '.join(written)}")
    return "\n".join(lines)


def _named(rules: dict[str, _Parts]) -> dict[str, str]:
    """Return Lark's names: terminals, which refer only to terminals, are in capitals."""
    called = {name: {part.text for part in parts if isinstance(part, _Token)} for name, parts in rules.items()}
    callers: defaultdict[str, list[str]] = defaultdict(list)
    for name, others in called.items():
        for other in others:
            callers[other].append(name)
    left = {name: len(others) for name, others in called.items()}
    terminal = [name for name, count in left.items() if count == 0]
    for name in terminal:  # grows during the loop
        for caller in callers[name]:
            left[caller] -= 1
            if left[caller] == 0:
                terminal.append(caller)
    kinds = set(terminal)
    return {name: f"TERMINAL_{i}" if name in kinds else f"rule_{i}" for i, name in enumerate(rules)}


def _tokens(source: str) -> Iterator[_Token]:
    at, line, begin = 0, 1, 0
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None:
            _Token("", source[at], line, at - begin + 1).refuse(f"{source[at]!r} means nothing here")
        kind = str(found.lastgroup)
        if kind != "space":
            yield _Token(kind, found[0], line, at - begin + 1)
        newlines = found[0].count("\n")
        if newlines:
            line, begin = line + newlines, at + found[0].rindex("\n") + 1
        at = found.end()


def _body(tokens: list[_Token]) -> _Parts:
    """Check the right side of a rule and convert it to Lark."""
    found: _Parts = []
    open_groups: list[_Token] = []
    is_empty, may_repeat = True, False  # the current alternative; whether an item has just ended
    for token in tokens:
        if token.kind == "repeat":
            if not may_repeat:
                token.refuse(f"'{token.text}' has nothing to repeat")
            found.append(_repetition(token))
            may_repeat = False
            continue
        if token.text == ")" and not open_groups:
            token.refuse("there is no '(' for it")
        if token.text in ("|", ")") and is_empty:
            found.append('""')
        found.append(_item(token))
        if token.text == "(":
            open_groups.append(token)
        if token.text == ")":
            open_groups.pop()
        is_empty = token.text in ("|", "(")
        may_repeat = not is_empty
    if open_groups:
        open_groups[-1].refuse("there is no ')' for it")
    return [*found, '""'] if is_empty else found


def _item(token: _Token) -> str | _Token:
    if token.kind == "literal":
        return literal(_unescaped(token, token.text[1:-1]))
    if token.kind == "class":
        return _class(token)
    if token.kind == "assign":
        token.refuse("'::=' must follow the name of a rule")
    if token.kind == "name":
        return token
    return ANYTHING if token.text == "." else token.text


def _repetition(token: _Token) -> str:
    if token.text[0] != "{":
        return token.text
    least, comma, most = re.sub(r"\s", "", token.text[1:-1]).partition(",")
    if most and int(most) < int(least):
        token.refuse(f"{token.text} is invalid: the second number is smaller")
    return f"{{{least}{comma}{most}}}"


def _unescaped(token: _Token, inside: str) -> str:
    def plain(found: re.Match[str]) -> str:
        char = _char(found[1])
        if char is None or char == "\0":
            token.refuse(f"'{found[0]}' is no escape that can be used here")
        return char

    return _ESCAPE.sub(plain, inside)


def _char(escape: str) -> str | None:
    if escape[0] in "xuU" and len(escape) > 1:
        number = int(escape[1:], 16)
        return chr(number) if number <= 0x10FFFF and not 0xD800 <= number < 0xE000 else None
    return _PLAIN.get(escape, escape if escape in '"\\[]-^/.' else None)


def _class(token: _Token) -> str:
    """Convert a character class to a regular expression. Characters become numbers, so that none is special."""
    inside = token.text[1:-1]
    sign = "^" if inside.startswith("^") else ""
    chars: list[tuple[str, bool]] = []  # with whether it was escaped
    rest = inside[len(sign) :]
    at = 0
    while at < len(rest):
        found = _ESCAPE.match(rest, at)
        chars.append((rest[at], False) if found is None else (_unescaped(token, found[0]), True))
        at += 1 if found is None else len(found[0])
    if not chars:
        token.refuse("the class is empty")
    written: list[str] = []
    for at, (char, is_escaped) in enumerate(chars):
        is_range = char == "-" and not is_escaped and 0 < at < len(chars) - 1
        if is_range and ord(chars[at - 1][0]) > ord(chars[at + 1][0]):
            token.refuse(f"the range {chars[at - 1][0]}-{chars[at + 1][0]} is empty")
        written.append("-" if is_range else f"\\u{{{ord(char):X}}}")
    return f"/[{sign}{''.join(written)}]/"
