"""The tokenizer as grammars see it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from llguidance import LLTokenizer, TokenizerWrapper

from freehold.contract.arrays import Int32


class TokenText(Protocol):
    """The tokenizer data that grammars need (`freehold.text.tokenizer.Tokenizer`)."""

    pieces: list[bytes]
    special: frozenset[int]
    eos_tokens: tuple[int, ...]
    bos_token: int | None

    @property
    def marker_tokens(self) -> Collection[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> Int32: ...


class _Wrapped:
    """A tokenizer with the attributes that llguidance expects."""

    def __init__(self, tokenizer: TokenText):
        self._tokenizer = tokenizer
        self.eos_token_id = next(iter(tokenizer.eos_tokens), 0)
        self.bos_token_id = tokenizer.bos_token
        self.tokens: Sequence[bytes] = tokenizer.pieces
        # Marker tokens are not text: a grammar has to name them.
        self.special_token_ids: Collection[int] = sorted({*tokenizer.special, *tokenizer.marker_tokens})

    def __call__(self, text: str | bytes) -> list[int]:
        """Encode text. Raises UnicodeDecodeError for invalid UTF-8."""
        whole = text if isinstance(text, str) else text.decode()
        return self._tokenizer.encode(whole, add_special_tokens=False).tolist()


def grammar_tokenizer(tokenizer: TokenText, vocab_size: int) -> LLTokenizer:
    """Wrap a tokenizer, which takes 0.1 s for 50,000 tokens. `vocab_size` is the model's; ids beyond the tokenizer's
    are never legal."""
    return LLTokenizer(
        TokenizerWrapper(_Wrapped(tokenizer)), n_vocab=vocab_size, eos_token=list(tokenizer.eos_tokens) or None
    )
