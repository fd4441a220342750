"""The cached part of a sequence: a prefix in the tree and, behind it, the tail that a session parked."""

from __future__ import annotations

from dataclasses import dataclass

from freehold.memory.prefix.node import Match
from freehold.memory.tails import Tail


@dataclass(frozen=True)
class Hit:
    """Holds no resource, so making room may leave it stale (`Match.version`). A stale hit can't be leased."""

    match: Match
    tail: Tail | None = None

    @property
    def length(self) -> int:
        """Tokens that need not be computed."""
        return self.match.length if self.tail is None else self.tail.end

    def covered(self, page_size: int) -> int:
        """Return how many tokens its pages have room for."""
        return self.match.length + (0 if self.tail is None else page_size)
