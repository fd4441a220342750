"""A store that fails is left alone for a while (circuit breaker; Nygard, "Release It!")."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from freehold.store.store import Item, Store, StoreStats, StoreUnavailable

FAILURES_MAX = 3
RETRY_S = 5.0

Result = TypeVar("Result")


class Breaker:
    """Passes calls to a store. After FAILURES_MAX failures in a row every call raises StoreUnavailable at once; after
    RETRY_S one call is let through, and if it succeeds, so are the others."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic):
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._retry_at = 0.0
        self.refused = 0  # calls that were not passed on

    @property
    def is_open(self) -> bool:
        """Whether the store is left alone."""
        return self._failures >= FAILURES_MAX

    def check(self, deadline: float) -> None:
        self._store.check(deadline)

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return self._pass(lambda: self._store.contains(keys, deadline))

    def get(self, keys: Sequence[bytes], deadline: float) -> Iterator[memoryview | None]:
        self._admit()
        try:
            yield from self._store.get(keys, deadline)
        except Exception:
            self._failed()
            raise
        self._succeeded()

    def put(self, items: Sequence[Item], deadline: float) -> int:
        return self._pass(lambda: self._store.put(items, deadline))

    def clear(self, deadline: float) -> None:
        self._pass(lambda: self._store.clear(deadline))

    def all_keys(self) -> Iterator[bytes]:
        return self._store.all_keys()

    def foreign(self) -> Iterator[str]:
        return self._store.foreign()

    def raw(self, key: bytes) -> bytes | None:
        return self._store.raw(key)

    def discard(self, keys: Collection[bytes]) -> None:
        self._store.discard(keys)

    def stats(self) -> StoreStats:
        return self._store.stats()

    def close(self) -> None:
        self._store.close()

    def _pass(self, call: Callable[[], Result]) -> Result:
        self._admit()
        try:
            result = call()
        except Exception:
            self._failed()
            raise
        self._succeeded()
        return result

    def _admit(self) -> None:
        """Raises StoreUnavailable while the store is left alone."""
        with self._lock:
            if self.is_open:
                if self._clock() < self._retry_at:
                    self.refused += 1
                    raise StoreUnavailable("the store failed and is left alone for a while")
                self._retry_at = self._clock() + RETRY_S  # this call is the one that tries

    def _failed(self) -> None:
        with self._lock:
            self._failures += 1
            self._retry_at = self._clock() + RETRY_S

    def _succeeded(self) -> None:
        with self._lock:
            self._failures = 0
