"""Retention hints of requests, which cached pages carry until they fade."""

from __future__ import annotations

from dataclasses import dataclass

from freehold.contract.errors import InvalidParameter
from freehold.contract.whole import WHOLE_MAX, is_whole

PRIORITY_MAX = 100
TTL_MIN, TTL_MAX = 0.001, 7 * 86400.0  # seconds
DONE = -1  # the level of pages not expected to be reused


@dataclass(frozen=True)
class Retention:
    """A hint: the first `end` tokens of a sequence (None: all of them, output included) will be requested again. Under
    pressure pages of lower priority go first, whatever their age. `ttl` is soft: the priority is halved every `ttl`
    seconds, down to nothing. Priority 0 means no reuse: these pages go first.

    A hint never pins, and one that exceeds the budget is refused. Raises InvalidParameter.
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
