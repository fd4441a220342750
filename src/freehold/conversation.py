"""A conversation: the tokens of its finished turns. Whatever becomes of its KV, they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from freehold.errors import TurnRefused


@dataclass
class Conversation:
    """At most one turn at a time; one that is abandoned leaves no trace.

    `capacity` is the most tokens that history, input and output may have together, None for no limit. `ends` are the
    lengths of the history after each turn. Both lists are replaced, never changed: forks share them.
    """

    tokens: list[int] = field(default_factory=list[int])
    capacity: int | None = None
    ends: list[int] = field(default_factory=list[int])
    in_turn: bool = False

    @property
    def turns(self) -> int:
        return len(self.ends)

    def begin(self, new: Sequence[int], keep: int | None = None) -> list[int]:
        """Start a turn with new input after the history, or after its first `keep` tokens -> all tokens of
        it. Raises TurnRefused."""
        if self.in_turn:
            raise TurnRefused("the session already has an active request")
        whole = [*self.tokens[:keep], *new]
        if not whole:
            raise TurnRefused("the turn has no tokens, and the session no history")
        if self.capacity is not None and len(whole) >= self.capacity:
            raise TurnRefused(
                f"history and input have {len(whole)} tokens together, the session's capacity is {self.capacity}, "
                "output included"
            )
        self.in_turn = True
        return whole

    def commit(self, whole: Sequence[int], output: Sequence[int]) -> None:
        """The turn has finished: `whole`, as `begin` gave it, and its output are history now."""
        assert self.in_turn
        self.tokens = [*whole, *output]
        self.ends = [*self.ends, len(self.tokens)]
        self.in_turn = False

    def abandon(self) -> None:
        """The turn came to nothing: the conversation is as it was before. Idempotent."""
        self.in_turn = False

    def rewind(self, to: int) -> None:
        """Forget all but the first `to` tokens, and the turns that end behind them. Raises TurnRefused."""
        if self.in_turn:
            raise TurnRefused("the session has an active request")
        if not 0 <= to <= len(self.tokens):
            raise TurnRefused(f"to: must be between 0 and the session's {len(self.tokens)} tokens, got {to}", "to")
        self.tokens = self.tokens[:to]
        self.ends = [end for end in self.ends if end <= to]

    def fork(self) -> Conversation:
        """Another one with the same history. What is in a turn now is not part of it."""
        return Conversation(self.tokens, self.capacity, self.ends)
