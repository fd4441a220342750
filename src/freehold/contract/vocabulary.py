"""What the scheduler must know of a model's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freehold.contract.arrays import Bool, Int32


@dataclass(frozen=True)
class Vocabulary:
    """`token_bytes[t]` is the text that token t stands for, empty for special tokens."""

    size: int
    eos_tokens: tuple[int, ...]
    token_bytes: Sequence[bytes]

    def is_eos(self, tokens: Int32) -> Bool:
        """int32 [n] -> bool [n]"""
        found = tokens == (self.eos_tokens[0] if self.eos_tokens else -1)
        for token in self.eos_tokens[1:]:
            found |= tokens == token
        return found


def find_stop(tail: bytes, piece: bytes, stops: tuple[bytes, ...]) -> tuple[int | None, bytes]:
    """Look for stop strings in `tail + piece`, where `tail` was searched before.

    -> the index of the stop that matches earliest (None if none does), and the tail to keep: as much
    as could still be the beginning of a stop.
    """
    text = tail + piece
    hits = [(at, index) for index, stop in enumerate(stops) if (at := text.find(stop)) >= 0]
    if hits:
        return min(hits)[1], text
    keep = max(len(stop) for stop in stops) - 1
    return None, text[-keep:] if keep else b""
