"""Runs calls that may hang in threads, so that the caller waits no longer than its deadline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from freehold.store.store import StoreUnavailable

Result = TypeVar("Result")


def until_failure(results: Iterable[Result]) -> list[Result]:
    """Return all results, or those before a failure: a slow store makes progress, too. Raise StoreUnavailable if there
    are none."""
    found: list[Result] = []
    try:
        for result in results:
            found.append(result)
    except StoreUnavailable:
        if not found:
            raise
    return found


class Lane:
    """Threads for one kind of calls. A late call outlives its caller's wait and occupies a thread until it ends. So it
    must not use the caller's memory. `deadline`: seconds that the caller waits in total."""

    def __init__(self, name: str, threads: int):
        self._name = name
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, name)
        self._underway: set[Future[Any]] = set()

    def each(self, calls: Iterable[Callable[[], Result]], deadline: float) -> Iterator[Result]:
        """Yield the results of `calls`, in order. Calls are taken as threads become free. Raise StoreUnavailable past
        the deadline, and whatever a call raises."""
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
        """Return the result of one call."""
        (result,) = self.each((call,), deadline)
        return result

    def drain(self, deadline: float) -> None:
        """Wait for late calls, too. Raise StoreUnavailable if one does not end."""
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
        """Return a call's result. Raise TimeoutError at `end`."""
        if wait((future,), max(end - time.monotonic(), 0)).not_done:
            future.cancel()
            raise TimeoutError
        return future.result()
