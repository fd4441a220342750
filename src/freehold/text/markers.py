"""Markers: texts that set thoughts and calls of tools apart, as a vocabulary writes them.

Many vocabularies have a marker as one token. There the marker is that token and nothing else: the same letters in
other tokens are text. In the text of an output such a token stands as one character that no UTF-8 decodes to (a
surrogate), so that whoever reads the text can't mistake one for the other.
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
    """Those of MARKERS that are a token each. `pieces[t]`: the bytes of token t."""

    def __init__(self, pieces: Sequence[bytes]):
        names = {marker.encode(): marker for marker in MARKERS}
        self.tokens: dict[str, int] = {names[piece]: token for token, piece in enumerate(pieces) if piece in names}
        self._marks = {marker: chr(_FIRST_MARK + i) for i, marker in enumerate(self.tokens)}
        self._texts = {ord(mark): marker for marker, mark in self._marks.items()}

    def seen(self, marker: str) -> str:
        """What stands for it in the text of an output."""
        return self._marks.get(marker, marker)

    def marks(self, markers: Iterable[str]) -> dict[int, str]:
        """The character for each token that is one of `markers`."""
        return {self.tokens[marker]: self._marks[marker] for marker in markers if marker in self.tokens}

    def in_grammar(self, marker: str) -> str:
        """In Lark."""
        token = self.tokens.get(marker)
        return literal(marker) if token is None else f"<[{token}]>"

    def shown(self, text: str) -> str:
        """Text for a reader, with markers spelled out."""
        return text.translate(self._texts)
