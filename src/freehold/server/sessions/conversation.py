"""A conversation: the result of its finished turns, kept independently of its KV."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from freehold.contract.arrays import Int32
from freehold.contract.errors import TurnRefused

NO_TOKENS: Int32 = np.empty(0, np.int32)
NO_MESSAGES = "[]"
OBJECT_BYTES = 512  # overhead of a conversation besides tokens and texts


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Conversation:
    """An immutable value. Each turn makes a new one that continues the previous one. So a fork is the same value, and
    branches share their beginning.

    Its tokens are the first `start` tokens of `before`, then `added`, int32, of which the first `asked` were input.
    `said` is a JSON list of the messages that came with `added`. Messages of `before` come first, unless the
    conversation `forgets` them. `number` identifies it within its session; 0 without tokens means no turn yet.
    """

    before: Conversation | None = None
    start: int = 0
    added: Int32 = field(default_factory=lambda: NO_TOKENS)
    asked: int = 0
    turns: int = 0
    said: str = NO_MESSAGES
    forgets: bool = False
    number: int = 0

    @property
    def path(self) -> Iterator[Conversation]:
        """This conversation and all that it continues, newest first."""
        one: Conversation | None = self
        while one is not None:
            yield one
            one = one.before

    @property
    def tokens(self) -> Int32:
        """All tokens int32 [length], copied if they are in several parts."""
        return _joined(self._parts())

    def _parts(self) -> list[Int32]:
        parts: list[Int32] = []
        end = self.length
        for one in self.path:
            if one.start < end:
                parts.append(one.added[: end - one.start])
                end = one.start
        return parts[::-1]

    @property
    def messages(self) -> str:
        """All messages up to the last answer, as a JSON list."""
        texts: list[str] = []
        for one in self.path:
            texts.append(one.said)
            if one.forgets:
                break
        return lists_joined(texts[::-1])

    @property
    def length(self) -> int:
        return self.start + len(self.added)

    @property
    def nbytes(self) -> int:
        """Its size without the conversations that it continues."""
        return self.added.nbytes + len(self.said) + OBJECT_BYTES

    def begin(self, new: Int32, capacity: int | None = None) -> Int32:
        """Return all tokens int32 [n] of a turn with the input `new`.

        History, input and output may have `capacity` tokens together. Raises TurnRefused.
        """
        whole = _joined([*self._parts(), new])
        if not len(whole):
            raise TurnRefused("the turn has no tokens, and the session no history")
        if capacity is not None and len(whole) >= capacity:
            raise TurnRefused(
                f"history and input have {len(whole)} tokens together, the session's capacity is {capacity}, "
                "output included"
            )
        return whole

    def after(self, whole: Int32, output: Sequence[int], said: str = NO_MESSAGES, number: int = 0) -> Conversation:
        """Return the conversation after a finished turn; `whole` is the result of `begin`."""
        added = np.concatenate([whole[self.length :], np.array(output, np.int32)])
        asked = len(whole) - self.length
        if len(self.added) or self.number:
            return Conversation(self, self.length, added, asked, self.turns + 1, said, number=number)
        said = lists_joined([self.said, said])
        return Conversation(self.before, self.start, added, asked, self.turns + 1, said, self.forgets, number)

    def up_to(self, end: int) -> Conversation:
        """Return a branch with its first `end` tokens."""
        return self if end >= self.length else Conversation(self, end, turns=self.turns)

    def shortened(self, to: int) -> Conversation:
        """Return its first `to` tokens with all messages, without the turns after those tokens."""
        texts: list[str] = []
        forgets, before = False, self
        while before is not None and before.start >= to:
            if not forgets:
                texts.append(before.said)
                forgets = before.forgets
            before = before.before
        return Conversation(before, to, turns=self.turns, said=lists_joined(texts[::-1]), forgets=forgets)

    def rewound(self, to: int) -> Conversation:
        """Return its first `to` tokens and the turns that end by then. Messages are dropped, since they can't be cut at
        a token. Raises TurnRefused."""
        if not 0 <= to <= self.length:
            raise TurnRefused(f"to: must be between 0 and the session's {self.length} tokens, got {to}", "to")
        cut = self.shortened(to)
        last = cut.before
        if last is not None and last.length > to:
            last = last.before
        return replace(cut, turns=0 if last is None else last.turns, said=NO_MESSAGES, forgets=True)


def lists_joined(lists: Sequence[str]) -> str:
    """Concatenate JSON lists without parsing them."""
    return f"[{', '.join(text[1:-1] for text in lists if text != NO_MESSAGES)}]"


def with_messages(messages: str, new: Sequence[dict[str, Any]]) -> str:
    """Append `new` to a JSON list of messages."""
    return lists_joined([messages, json.dumps(new)])


def _joined(parts: Sequence[Int32]) -> Int32:
    full = [part for part in parts if len(part)]
    return full[0] if len(full) == 1 else np.concatenate([NO_TOKENS, *full])
