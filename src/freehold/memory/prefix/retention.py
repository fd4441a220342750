"""How long a prefix is worth keeping: hints of requests, which cached pages carry until they fade."""

from __future__ import annotations

from dataclasses import dataclass

from freehold.contract.errors import InvalidParameter
from freehold.contract.whole import WHOLE_MAX, is_whole

PRIORITY_MAX = 100
TTL_MIN, TTL_MAX = 0.001, 7 * 86400.0  # seconds
DONE = -1  # the level of what nobody will ask for again


@dataclass(frozen=True)
class Retention:
    """A hint: the first `end` tokens of a sequence (None: all of them, output included) will be asked for
    again. Under pressure pages of lower priority go first, whatever their age. `ttl` is soft: after so many
    seconds the priority is halved, and again, until nothing is left of it. Priority 0 says that nobody will
    come back: these pages go before all others.

    Nothing is ever pinned by a hint, and one that exceeds the budget is refused.
    Raises InvalidParameter.
    """

    priority: int = 50
    ttl: float = 300.0
    end: int | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.priority, 0, PRIORITY_MAX):
            raise InvalidParameter("priority", f"must be between 0 and {PRIORITY_MAX}, got {self.priority}")
        if not TTL_MIN <= self.ttl <= TTL_MAX:
            raise InvalidParameter("ttl", f"must be between {TTL_MIN:g} and {TTL_MAX:g} seconds, got {self.ttl:g}")
        if self.end is not None and not is_whole(self.end, 0):
            raise InvalidParameter("end", f"must be between 0 and {WHOLE_MAX}, got {self.end}")
