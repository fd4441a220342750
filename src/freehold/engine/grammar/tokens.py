"""The tokenizer as grammars see it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from llguidance import LLTokenizer, TokenizerWrapper

from freehold.contract.arrays import Int32


class TokenText(Protocol):
    """What grammars must know of a tokenizer (`freehold.text.tokenizer.Tokenizer`)."""

    pieces: list[bytes]
    special: frozenset[int]
    eos_tokens: tuple[int, ...]
    bos_token: int | None

    @property
    def marker_tokens(self) -> Collection[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> Int32: ...


class _Wrapped:
    """By the names that llguidance asks for."""

    def __init__(self, tokenizer: TokenText):
        self._tokenizer = tokenizer
        self.eos_token_id = next(iter(tokenizer.eos_tokens), 0)
        self.bos_token_id = tokenizer.bos_token
        self.tokens: Sequence[bytes] = tokenizer.pieces
        # A marker that is a token is not text: a grammar has to name it.
        self.special_token_ids: Collection[int] = sorted({*tokenizer.special, *tokenizer.marker_tokens})

    def __call__(self, text: str | bytes) -> list[int]:
        """Raises UnicodeDecodeError for bytes that are no text."""
        whole = text if isinstance(text, str) else text.decode()
        return self._tokenizer.encode(whole, add_special_tokens=False).tolist()


def grammar_tokenizer(tokenizer: TokenText, vocab_size: int) -> LLTokenizer:
    """Takes a tenth of a second for 50,000 tokens. `vocab_size`: of the model; ids beyond the tokenizer's are never
    legal."""
    return LLTokenizer(
        TokenizerWrapper(_Wrapped(tokenizer)), n_vocab=vocab_size, eos_token=list(tokenizer.eos_tokens) or None
    )
