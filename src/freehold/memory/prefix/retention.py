"""How long a prefix is worth keeping: hints of requests, which cached pages carry until they fade."""

from __future__ import annotations

from dataclasses import dataclass

PRIORITY_MAX = 100
DONE = -1  # the level of what nobody will ask for again


@dataclass(frozen=True)
class Retention:
    """A hint: the first `end` tokens of a sequence (None: all of them, output included) will be asked for
    again. Under pressure pages of lower priority go first, whatever their age. `ttl` is soft: after so many
    seconds the priority is halved, and again, until nothing is left of it. Priority 0 says that nobody will
    come back: these pages go before all others.

    Nothing is ever pinned by a hint, and one that exceeds the budget is refused.
    Raises ValueError naming the field.
    """

    priority: int = 50
    ttl: float = 300.0
    end: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= PRIORITY_MAX:
            raise ValueError(f"priority: must be between 0 and {PRIORITY_MAX}, got {self.priority}")
        if not 0 < self.ttl <= 7 * 86400:
            raise ValueError(f"ttl: must be positive and at most a week of seconds, got {self.ttl:g}")
        if self.end is not None and self.end < 0:
            raise ValueError(f"end: must not be negative, got {self.end}")
