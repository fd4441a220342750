"""A conversation: what its finished turns have come to. Whatever becomes of its KV, that is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from freehold.arrays import Int32
from freehold.errors import TurnRefused

NO_TOKENS: Int32 = np.empty(0, np.int32)
NO_MESSAGES = "[]"


@dataclass(frozen=True, eq=False)
class Conversation:
    """A value: each turn makes another one, which shares the arrays of the one before. So a fork is the same value.

    `parts` are its tokens int32, one array behind the other. `ends` int32 [turns] are the lengths of the history after
    each turn. `messages` are those of a chat up to its last answer, as a list in JSON.
    """

    parts: tuple[Int32, ...] = ()
    ends: Int32 = field(default_factory=lambda: NO_TOKENS)
    messages: str = NO_MESSAGES

    @property
    def tokens(self) -> Int32:
        """All of them int32 [length], a copy if they are in several parts."""
        return _joined(self.parts)

    @property
    def length(self) -> int:
        return sum(map(len, self.parts))

    @property
    def turns(self) -> int:
        return len(self.ends)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + self.ends.nbytes + len(self.messages)

    def begin(self, new: Int32, keep: int | None = None, capacity: int | None = None) -> Int32:
        """All tokens int32 [n] of a turn with the input `new` after the history, or after its first `keep` tokens.

        History, input and output may have `capacity` tokens together. Raises TurnRefused.
        """
        history = self.parts if keep is None else (self.tokens[:keep],)
        whole = _joined((*history, new))
        if not len(whole):
            raise TurnRefused("the turn has no tokens, and the session no history")
        if capacity is not None and len(whole) >= capacity:
            raise TurnRefused(
                f"history and input have {len(whole)} tokens together, the session's capacity is {capacity}, "
                "output included"
            )
        return whole

    def after(self, whole: Int32, output: Sequence[int], messages: str | None = None) -> Conversation:
        """With a turn that has finished: `whole` is what `begin` gave. Without `messages` they stay as they are."""
        end = np.array([len(whole) + len(output)], np.int32)
        return Conversation(
            (whole, np.array(output, np.int32)),
            np.concatenate([self.ends, end]),
            self.messages if messages is None else messages,
        )

    def rewound(self, to: int) -> Conversation:
        """Without all but the first `to` tokens, without the turns that end behind them, and without messages, which
        can't be cut at a token. Raises TurnRefused."""
        if not 0 <= to <= self.length:
            raise TurnRefused(f"to: must be between 0 and the session's {self.length} tokens, got {to}", "to")
        return replace(self, parts=(self.tokens[:to].copy(),), ends=self.ends[self.ends <= to], messages=NO_MESSAGES)


def with_messages(messages: str, new: Sequence[dict[str, Any]]) -> str:
    """A list in JSON with `new` behind the messages that it has. What it has is not read."""
    lists = [text[1:-1] for text in (messages, json.dumps(new)) if text != NO_MESSAGES]
    return f"[{', '.join(lists)}]"


def _joined(parts: tuple[Int32, ...]) -> Int32:
    return parts[0] if len(parts) == 1 else np.concatenate([NO_TOKENS, *parts])
