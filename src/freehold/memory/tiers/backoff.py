"""How long to wait before a retry."""

from __future__ import annotations

RETRY_S, RETRY_MAX_S = 1.0, 60.0


class Backoff:
    """A pause after a failure: RETRY_S, doubled after each further one, at most `longest`. A success makes the next
    pause short again. Failures during a pause concern work begun before it and do not prolong it."""

    def __init__(self, longest: float = RETRY_MAX_S):
        self._longest = longest
        self._seconds, self._until = RETRY_S, 0.0

    def is_over(self, now: float) -> bool:
        """Return whether there is no pause; `now` in seconds of the scheduler's clock."""
        return now >= self._until

    def failed(self, now: float) -> None:
        if self.is_over(now):
            self._until = now + self._seconds
            self._seconds = min(2 * self._seconds, self._longest)

    def succeeded(self) -> None:
        self._seconds = RETRY_S
