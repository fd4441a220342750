"""Use of each key's quota."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from freehold.contract.errors import TooManyRequests

MINUTE_S = 60.0


@dataclass(frozen=True)
class Quota:
    """Limits of a key; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


class Allowance:
    """A token bucket that holds a minute's worth. Costs known only later may overdraw it; then the next minute has
    less."""

    def __init__(self, per_minute: int, clock: Callable[[], float]):
        self._per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute)
        self._at = clock()

    def _fill(self) -> None:
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self._per_minute / MINUTE_S, float(self._per_minute))
        self._at = now

    def wait(self, amount: float = 1.0) -> float:
        """Return the seconds until `amount` may be spent."""
        self._fill()
        return max(amount - self._left, 0.0) * MINUTE_S / self._per_minute

    def spend(self, amount: float) -> None:
        self._fill()
        self._left -= amount


class Usage:
    """Quota use of one key."""

    def __init__(self, quota: Quota, clock: Callable[[], float] = time.monotonic):
        self._quota = quota
        self._running = 0
        self._requests = None if quota.requests_per_minute is None else Allowance(quota.requests_per_minute, clock)
        self._tokens = None if quota.tokens_per_minute is None else Allowance(quota.tokens_per_minute, clock)

    def begin(self) -> None:
        """Start a request. Raises TooManyRequests, leaving usage unchanged."""
        if self._quota.concurrency is not None and self._running >= self._quota.concurrency:
            raise TooManyRequests(f"this key may have {self._quota.concurrency} requests at a time", 1.0)
        for allowance, what in ((self._requests, "requests_per_minute"), (self._tokens, "tokens_per_minute")):
            if allowance is not None and (seconds := allowance.wait()) > 0:
                raise TooManyRequests(f"this key has used up its {what}: try again in {seconds:.0f} s", seconds)
        if self._requests is not None:
            self._requests.spend(1)
        self._running += 1

    def end(self) -> None:
        self._running -= 1

    def spend(self, tokens: int) -> None:
        """Spend prompt and output tokens as they become known."""
        if self._tokens is not None:
            self._tokens.spend(tokens)


class UsageTable:
    """Usage by client, for keys with a quota."""

    def __init__(self) -> None:
        self._of: dict[str, Usage] = {}

    def of(self, name: str, quota: Quota) -> Usage | None:
        if quota == Quota():
            return None
        if name not in self._of:
            self._of[name] = Usage(quota)
        return self._of[name]
