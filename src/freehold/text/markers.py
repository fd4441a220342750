"""Markers of thoughts and tool calls, as a vocabulary writes them.

In many vocabularies a marker is one token. Then only that token is the marker: the same letters in other tokens are
text. In an output's text such a token becomes one character that UTF-8 can't decode to (a surrogate), so that parsers
can't confuse the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from freehold.text.lark import literal

MARKERS = (
    "<think>", "</think>", "[THINK]", "[/THINK]",
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
_FIRST_MARK = 0xD800


class Markers:
    """The MARKERS that are single tokens. `pieces[t]`: the bytes of token t."""

    def __init__(self, pieces: Sequence[bytes]):
        names = {marker.encode(): marker for marker in MARKERS}
        self.tokens: dict[str, int] = {names[piece]: token for token, piece in enumerate(pieces) if piece in names}
        self._marks = {marker: chr(_FIRST_MARK + i) for i, marker in enumerate(self.tokens)}
        self._texts = {ord(mark): marker for marker, mark in self._marks.items()}

    def seen(self, marker: str) -> str:
        """Return the marker's form in an output's text."""
        return self._marks.get(marker, marker)

    def marks(self, markers: Iterable[str]) -> dict[int, str]:
        """Return the character for each token that is one of `markers`."""
        return {self.tokens[marker]: self._marks[marker] for marker in markers if marker in self.tokens}

    def in_grammar(self, marker: str) -> str:
        """Return the marker in Lark."""
        token = self.tokens.get(marker)
        return literal(marker) if token is None else f"<[{token}]>"

    def shown(self, text: str) -> str:
        """Return text with markers spelled out."""
        return text.translate(self._texts)
