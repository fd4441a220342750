"""Converts text to tokens and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer as FastTokenizer

from freehold.contract.arrays import Int32
from freehold.contract.vocabulary import Vocabulary
from freehold.text.chat_template import ChatTemplate
from freehold.text.markers import Markers


@dataclass
class Tokenizer:
    """A fast tokenizer with the token data that the engine needs.

    `pieces[t]` are the bytes of token t, special tokens included. `defaults` are the sampling values that the model's
    authors recommend. `build` makes the fast tokenizer on the first encoding. It takes tens of megabytes, and decoding
    does without.
    """

    build: Callable[[], FastTokenizer]
    pieces: list[bytes]
    special: frozenset[int]
    eos_tokens: tuple[int, ...]
    bos_token: int | None = None
    adds_bos: bool = False
    chat_template: ChatTemplate | None = None
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])

    def with_chat_template(self, source: str) -> Tokenizer:
        """Return a copy with another template. Raises jinja2.TemplateSyntaxError."""
        known = {"bos_token": self.bos_token, "eos_token": next(iter(self.eos_tokens), None)}
        names = {name: self.pieces[token].decode() for name, token in known.items() if token is not None}
        return replace(self, chat_template=ChatTemplate(source, names))

    @functools.cached_property
    def fast(self) -> FastTokenizer:
        return self.build()

    def encode(self, text: str, add_special_tokens: bool = True) -> Int32:
        # A batch of one, because unlike `encode` it releases the GIL.
        (encoding,) = self.fast.encode_batch_fast([text], add_special_tokens=False)
        tokens = encoding.ids
        if add_special_tokens and self.adds_bos and self.bos_token is not None and tokens[:1] != [self.bos_token]:
            tokens = [self.bos_token, *tokens]
        return np.array(tokens, np.int32)

    @functools.cached_property
    def longest_piece(self) -> int:
        """Bytes of the longest token: n characters take at least n / longest_piece tokens."""
        return max(max(map(len, self.pieces)), 1)

    @functools.cached_property
    def markers(self) -> Markers:
        """The vocabulary's markers of thoughts and calls."""
        return Markers(self.pieces)

    @property
    def marker_tokens(self) -> Collection[int]:
        return self.markers.tokens.values()

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.piece(token, skip_special_tokens) for token in tokens).decode(errors="replace")

    def piece(self, token: int, skip_special_tokens: bool = True) -> bytes:
        """Return the bytes that a token adds to the text."""
        if not 0 <= token < len(self.pieces) or (skip_special_tokens and token in self.special):
            return b""
        return self.pieces[token]

    @property
    def vocabulary(self) -> Vocabulary:
        shown = [b"" if token in self.special else piece for token, piece in enumerate(self.pieces)]
        return Vocabulary(len(shown), self.eos_tokens, shown)
