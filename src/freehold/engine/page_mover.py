"""Host memory for pages, and the threads that move their bytes between device, host and storage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from freehold.arrays import Bool, UInt8
from freehold.engine.device import PageBytes
from freehold.mover import Kind, Order, Outcome, Report
from freehold.store.store import Item, Store

READERS = 4  # calls of the store that fetch, at a time
FETCH_DEADLINE_S = 5.0
STORE_DEADLINE_S = 10.0


class PageMover:
    """Implements `freehold.mover.Mover`. `device` copies pages of each cache group; the host gets `page_counts` pages
    of each, and page 0, which nobody uses. Memory is touched only when written."""

    def __init__(self, device: Sequence[PageBytes], page_counts: Sequence[int], store: Store | None = None):
        self._device = device
        self.host: list[UInt8] = [
            np.empty((count + 1, one.page_bytes), np.uint8) for one, count in zip(device, page_counts, strict=True)
        ]
        nothing = np.zeros(1, np.int32)
        for one, host in zip(device, self.host, strict=True):  # compiled now, the first copies are not slower
            one.gather(nothing, host, nothing)
            one.scatter(nothing, host, nothing)
        self._store = store
        # Orders of a kind run in turn; who waits for a page never waits behind one that is stored.
        self._copying = ThreadPoolExecutor(1, "kv-copy")
        self._fetching = ThreadPoolExecutor(READERS, "kv-fetch")
        self._storing = ThreadPoolExecutor(1, "kv-store")
        self._reported = threading.Event()

    def begin(self, order: Order, report: Report) -> None:
        pool, move = {
            Kind.BACKUP: (self._copying, self._back_up),
            Kind.LOAD: (self._copying, self._load),
            Kind.STORE: (self._storing, self._put),
            Kind.FETCH: (self._fetching, self._fetch),
            Kind.PROBE: (self._fetching, self._probe),
        }[order.kind]
        pool.submit(self._run, order, move, report)

    def _run(self, order: Order, move: Callable[[Order], list[Bool]], report: Report) -> None:
        before = time.perf_counter()
        try:
            whole, error = move(order), None
        except Exception as failure:
            whole, error = _all(order, False), f"{type(failure).__name__}: {failure}"
        report(Outcome(order.number, whole, time.perf_counter() - before, error))
        self._reported.set()

    def wait(self, seconds: float) -> None:
        self._reported.wait(seconds)
        self._reported.clear()

    def _back_up(self, order: Order) -> list[Bool]:
        for device, host, pages, to in zip(self._device, self.host, order.device, order.host, strict=True):
            device.gather(pages, host, to)
        return _all(order, True)

    def _load(self, order: Order) -> list[Bool]:
        for device, host, pages, at in zip(self._device, self.host, order.device, order.host, strict=True):
            device.scatter(pages, host, at)
        return _all(order, True)

    def _put(self, order: Order) -> list[Bool]:
        """Those behind the last that there was room for are not stored."""
        assert self._store is not None
        items = [
            Item(key, b"", host[page].data)
            for host, pages, keys in zip(self.host, order.host, order.keys, strict=True)
            for page, key in zip(pages.tolist(), keys, strict=True)
        ]
        stored = self._store.put(items, STORE_DEADLINE_S)
        return _by_group(order, [number < stored for number in range(len(items))])

    def _fetch(self, order: Order) -> list[Bool]:
        assert self._store is not None
        found = iter(self._store.get([key for keys in order.keys for key in keys], FETCH_DEADLINE_S))
        whole: list[bool] = []
        for host, pages in zip(self.host, order.host, strict=True):
            for page in pages.tolist():
                payload = next(found)
                fits = payload is not None and payload.nbytes == host.shape[1]
                if payload is not None and fits:
                    host[page] = np.frombuffer(payload, np.uint8)
                whole.append(fits)
        return _by_group(order, whole)

    def _probe(self, order: Order) -> list[Bool]:
        assert self._store is not None
        return _by_group(order, self._store.contains([key for keys in order.keys for key in keys], FETCH_DEADLINE_S))

    def shutdown(self) -> None:
        """Forget what is queued."""
        for pool in (self._copying, self._fetching, self._storing):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._store is not None:
            self._store.close()


def _all(order: Order, whole: bool) -> list[Bool]:
    return [np.full(count, whole, np.bool_) for count in order.page_counts]


def _by_group(order: Order, flat: Sequence[bool]) -> list[Bool]:
    return np.split(np.array(flat, np.bool_), np.cumsum(order.page_counts)[:-1])
