"""Calls that may hang are made in threads, so that the caller waits no longer than it wants to."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from freehold.store.store import StoreUnavailable

Result = TypeVar("Result")


def until_failure(results: Iterable[Result]) -> list[Result]:
    """All results, or those before a failure: a slow store gets on, too. Raises StoreUnavailable if there are none."""
    found: list[Result] = []
    try:
        for result in results:
            found.append(result)
    except StoreUnavailable:
        if not found:
            raise
    return found


class Lane:
    """Threads for one kind of calls. A late call goes on without its caller, and occupies a thread until it ends. So it
    must not use the caller's memory. `deadline`: seconds that the caller waits in all."""

    def __init__(self, name: str, threads: int):
        self._name = name
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, name)
        self._underway: set[Future[Any]] = set()

    def each(self, calls: Iterable[Callable[[], Result]], deadline: float) -> Iterator[Result]:
        """What `calls` return, in order. They are taken as threads become free. Raises StoreUnavailable when it is
        late, and what a call raises."""
        end, ahead = time.monotonic() + deadline, deque[Future[Result]]()
        try:
            for call in calls:
                ahead.append(self._begin(call))
                if len(ahead) > self._threads:
                    yield self._result(ahead.popleft(), end)
            while ahead:
                yield self._result(ahead.popleft(), end)
        except TimeoutError:
            raise StoreUnavailable(f"{self._name}: no answer within {deadline:g} s") from None
        finally:
            for future in ahead:
                future.cancel()

    def run(self, call: Callable[[], Result], deadline: float) -> Result:
        """What one call returns."""
        (result,) = self.each((call,), deadline)
        return result

    def drain(self, deadline: float) -> None:
        """Wait for late calls, too. Raises StoreUnavailable if one does not end."""
        if wait(list(self._underway), deadline).not_done:
            raise StoreUnavailable(f"{self._name}: late calls have not ended after {deadline:g} s")

    def close(self) -> None:
        """Cancel queued calls, and wait for none."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, call: Callable[[], Result]) -> Future[Result]:
        try:
            future = self._pool.submit(call)
        except RuntimeError:
            raise StoreUnavailable(f"{self._name}: it is closed") from None
        self._underway.add(future)
        future.add_done_callback(self._underway.discard)
        return future

    def _result(self, future: Future[Result], end: float) -> Result:
        """Raises TimeoutError."""
        if wait((future,), max(end - time.monotonic(), 0)).not_done:
            future.cancel()
            raise TimeoutError
        return future.result()
