"""Circuit breaker: a failing store is not called for a while (Nygard, "Release It!")."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from freehold.store.lane import Lane
from freehold.store.store import Item, Store, StoreStats, StoreUnavailable

FAILURES_MAX = 3
RETRY_S = 5.0
OPEN_S = 5.0

Result = TypeVar("Result")


class Circuit:
    """Whether calls of one kind are passed on. After FAILURES_MAX failures in a row they are refused; after RETRY_S one
    is let through, and its success closes the circuit."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._retry_at = 0.0
        self.trouble = ""  # the last failure
        self.refused = 0  # calls not passed on

    @property
    def is_open(self) -> bool:
        return self._failures >= FAILURES_MAX

    def admit(self) -> None:
        """Raise StoreUnavailable for a call that is not passed on."""
        with self._lock:
            if self.is_open:
                if self._clock() < self._retry_at:
                    self.refused += 1
                    raise StoreUnavailable("the store failed and is left alone for a while")
                self._retry_at = self._clock() + RETRY_S  # this call is the retry

    def failed(self, error: Exception) -> None:
        with self._lock:
            self._failures += 1
            self._retry_at = self._clock() + RETRY_S
            self.trouble = str(error)

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0


class Breaker:
    """Passes calls to a store. Each call tries to open the store until one succeeds. Asking, reading and writing
    have a circuit each, since one can fail without the others. Operators' calls are always passed on."""

    def __init__(self, open_store: Callable[[], Store], clock: Callable[[], float] = time.monotonic):
        self._open_store = open_store
        self._lock = threading.Lock()
        self._opening = Lane("opening the store", 1)
        self._store: Store | None = None
        self._is_closed = False
        self._unopened: str | None = "it has not been opened yet"
        self._checked: str | None = None  # why it did not answer when it was asked last
        self._asking, self._reading, self._writing = Circuit(clock), Circuit(clock), Circuit(clock)

    def _opened(self, deadline: float) -> Store:
        """Open the store if needed. Raise what opening raises."""
        if self._store is None:
            self._opening.run(self._open, deadline)
        assert self._store is not None
        return self._store

    def _open(self) -> None:
        if self._store is not None:
            return
        try:
            store = self._open_store()
        except Exception as error:
            self._unopened = str(error)
            raise
        with self._lock:
            self._store, self._unopened = store, None
            if self._is_closed:
                store.close()

    @property
    def trouble(self) -> str | None:
        """Why some calls are not passed on, or None."""
        open_ones = (one for one in (self._asking, self._reading, self._writing) if one.is_open)
        return self._unopened or self._checked or next((one.trouble for one in open_ones), None)

    def check(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        try:
            self._opened(deadline).check(max(end - time.monotonic(), 0))
        except Exception as error:
            self._checked = str(error)
            raise
        self._checked = None

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return self._pass(self._asking, lambda store: store.contains(keys, deadline), deadline)

    def get(self, keys: Sequence[bytes], deadline: float) -> Iterator[memoryview | None]:
        self._reading.admit()
        try:
            for number, payload in enumerate(self._opened(deadline).get(keys, deadline), 1):
                if number == len(keys):  # the caller need not exhaust the iterator
                    self._succeeded(self._reading)
                yield payload
        except Exception as error:
            self._reading.failed(error)
            raise

    def put(self, items: Sequence[Item], deadline: float) -> list[bool]:
        return self._pass(self._writing, lambda store: store.put(items, deadline), deadline)

    def clear(self, deadline: float) -> None:
        self._opened(deadline).clear(deadline)

    def all_keys(self) -> Iterator[bytes]:
        return self._opened(OPEN_S).all_keys()

    def foreign(self) -> Iterator[str]:
        return self._opened(OPEN_S).foreign()

    def raw(self, key: bytes) -> bytes | None:
        return self._opened(OPEN_S).raw(key)

    def discard(self, keys: Collection[bytes]) -> None:
        self._opened(OPEN_S).discard(keys)

    def stats(self) -> StoreStats:
        stats = StoreStats(None, None, None) if self._store is None else self._store.stats()
        return dataclasses.replace(stats, trouble=self.trouble)

    def close(self) -> None:
        self._opening.close()
        with self._lock:
            self._is_closed = True
            if self._store is not None:
                self._store.close()

    def _succeeded(self, circuit: Circuit) -> None:
        self._checked = None
        circuit.succeeded()

    def _pass(self, circuit: Circuit, call: Callable[[Store], Result], deadline: float) -> Result:
        circuit.admit()
        try:
            result = call(self._opened(deadline))
        except Exception as error:
            circuit.failed(error)
            raise
        self._succeeded(circuit)
        return result
