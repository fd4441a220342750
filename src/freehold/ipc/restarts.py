"""Limits and delays of engine restarts."""

from __future__ import annotations

from collections import deque

WINDOW_S = 3600.0
RECENT_S = 60.0
DELAY_S, DELAY_MAX_S = 0.5, 30.0


class Restarts:
    """At most `limit` restarts in an hour, with exponential backoff when they are close together."""

    def __init__(self, limit: int):
        self.count = 0
        self._limit = limit
        self._times: deque[float] = deque(maxlen=max(limit, 1))

    def delay(self, now: float) -> float | None:
        """Return the seconds to wait before the next restart; None if the limit is reached."""
        if sum(now - at < WINDOW_S for at in self._times) >= self._limit:
            return None
        recent = sum(now - at < RECENT_S for at in self._times)
        return min(DELAY_S * 2.0**recent, DELAY_MAX_S)

    def add(self, now: float) -> None:
        self.count += 1
        self._times.append(now)

    def __str__(self) -> str:
        return f"restart {self.count}, at most {self._limit} an hour"
