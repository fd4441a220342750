"""The threads that copy between host memory and a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from freehold.contract.arrays import Bool, UInt8
from freehold.contract.orders import Kind, Order
from freehold.store.lane import until_failure
from freehold.store.store import Item, Store, StoreUnavailable

READERS = 4  # concurrent fetches from the store
ASKERS = 2
FETCH_DEADLINE_S = 5.0
STORE_DEADLINE_S = 10.0

Run = Callable[[Callable[[Order], list[Bool]]], None]


class StorageIO:
    """One store and its threads. Lookups, fetches and writes have separate threads, so that none blocks another.
    `host`: uint8 [pages + 1, bytes of a page] of each cache group. `about`: a description of the
    stored entries of each, for people."""

    def __init__(self, store: Store, host: Sequence[UInt8], about: Sequence[bytes] = ()):
        self._store = store
        self._host = host
        self._about = about or [b""] * len(host)
        self._is_closing = False
        self._asking = ThreadPoolExecutor(ASKERS, "kv-ask")
        self._fetching = ThreadPoolExecutor(READERS, "kv-fetch")
        self._storing = ThreadPoolExecutor(1, "kv-store")

    def begin(self, order: Order, run: Run) -> None:
        """Queue an order. A thread calls `run` with the work."""
        if order.kind is Kind.STORE:
            self._storing.submit(run, self._put)
        elif order.kind is Kind.FETCH:
            self._fetching.submit(run, self._fetch)
        else:
            self._asking.submit(run, self._probe)

    @property
    def trouble(self) -> str | None:
        """Why the store is not used, if so."""
        return self._store.stats().trouble

    def clear(self) -> Future[None]:
        """Delete all stored pages, after the writes queued earlier. The future raises StoreUnavailable."""
        return self._storing.submit(self._store.clear, STORE_DEADLINE_S)

    def close(self) -> None:
        """Finish queued writes and running orders, then close the store. Other queued orders fail."""
        self._is_closing = True
        for threads in self._threads:
            threads.shutdown()
        self._store.close()

    def abandon(self) -> None:
        """Drop queued orders and close without waiting."""
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    @property
    def _threads(self) -> tuple[ThreadPoolExecutor, ...]:
        return self._asking, self._fetching, self._storing

    def _check_open(self) -> None:
        """Raise StoreUnavailable if the store is closing: no request waits for the answer."""
        if self._is_closing:
            raise StoreUnavailable("the store is being closed")

    def _put(self, order: Order) -> list[Bool]:
        items = [
            Item(key, about, host[page].data)
            for about, host, pages, keys in zip(self._about, self._host, order.host, order.keys, strict=True)
            for page, key in zip(pages.tolist(), keys, strict=True)
        ]
        return _by_group(order, self._store.put(items, STORE_DEADLINE_S))

    def _fetch(self, order: Order) -> list[Bool]:
        self._check_open()
        found = self._store.get([key for keys in order.keys for key in keys], FETCH_DEADLINE_S)
        whole = until_failure(self._taken(order, found))
        return _by_group(order, whole + [False] * (sum(order.page_counts) - len(whole)))

    def _taken(self, order: Order, found: Iterable[memoryview | None]) -> Iterator[bool]:
        """Copy found pages to the order's host pages, yielding whether each is complete."""
        payloads = iter(found)
        for host, pages in zip(self._host, order.host, strict=True):
            for page in pages.tolist():
                payload = next(payloads)
                fits = payload is not None and payload.nbytes == host.shape[1]
                if payload is not None and fits:
                    host[page] = np.frombuffer(payload, np.uint8)
                yield fits

    def _probe(self, order: Order) -> list[Bool]:
        self._check_open()
        return _by_group(order, self._store.contains([key for keys in order.keys for key in keys], FETCH_DEADLINE_S))


def _by_group(order: Order, flat: Sequence[bool]) -> list[Bool]:
    return np.split(np.array(flat, np.bool_), np.cumsum(order.page_counts)[:-1])
