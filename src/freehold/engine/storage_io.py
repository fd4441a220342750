"""The threads that move bytes between host memory and a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from freehold.arrays import Bool, UInt8
from freehold.mover import Kind, Order
from freehold.store.store import Item, Store

READERS = 4  # calls of the store that fetch, at a time
FETCH_DEADLINE_S = 5.0
STORE_DEADLINE_S = 10.0

Run = Callable[[Callable[[Order], list[Bool]]], None]


class StorageIO:
    """One store, and its threads: who waits for a page never waits behind one that is stored. `host`: uint8 [pages + 1,
    bytes of a page] of each cache group."""

    def __init__(self, store: Store, host: Sequence[UInt8]):
        self._store = store
        self._host = host
        self._fetching = ThreadPoolExecutor(READERS, "kv-fetch")
        self._storing = ThreadPoolExecutor(1, "kv-store")

    def begin(self, order: Order, run: Run) -> None:
        """`run` is called by a thread with what is to be done."""
        if order.kind is Kind.STORE:
            self._storing.submit(run, self._put)
        else:
            self._fetching.submit(run, self._fetch if order.kind is Kind.FETCH else self._probe)

    @property
    def trouble(self) -> str | None:
        """Why the store is left alone, if it is."""
        return self._store.stats().trouble

    def clear(self) -> Future[None]:
        """Forget all that is stored, and what was queued before. The future raises StoreUnavailable."""
        return self._storing.submit(self._store.clear, STORE_DEADLINE_S)

    def close(self) -> None:
        """End what has begun, then close the store."""
        self._fetching.shutdown(cancel_futures=False)
        self._storing.shutdown(cancel_futures=False)
        self._store.close()

    def abandon(self) -> None:
        """Wait for nothing, and begin nothing that is queued."""
        self._fetching.shutdown(wait=False, cancel_futures=True)
        self._storing.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    def _put(self, order: Order) -> list[Bool]:
        items = [
            Item(key, b"", host[page].data)
            for host, pages, keys in zip(self._host, order.host, order.keys, strict=True)
            for page, key in zip(pages.tolist(), keys, strict=True)
        ]
        return _by_group(order, self._store.put(items, STORE_DEADLINE_S))

    def _fetch(self, order: Order) -> list[Bool]:
        found = iter(self._store.get([key for keys in order.keys for key in keys], FETCH_DEADLINE_S))
        whole: list[bool] = []
        for host, pages in zip(self._host, order.host, strict=True):
            for page in pages.tolist():
                payload = next(found)
                fits = payload is not None and payload.nbytes == host.shape[1]
                if payload is not None and fits:
                    host[page] = np.frombuffer(payload, np.uint8)
                whole.append(fits)
        return _by_group(order, whole)

    def _probe(self, order: Order) -> list[Bool]:
        return _by_group(order, self._store.contains([key for keys in order.keys for key in keys], FETCH_DEADLINE_S))


def _by_group(order: Order, flat: Sequence[bool]) -> list[Bool]:
    return np.split(np.array(flat, np.bool_), np.cumsum(order.page_counts)[:-1])
