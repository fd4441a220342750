"""Host memory for pages, and the threads that copy them between device, host and storage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from freehold.contract.arrays import Bool, UInt8
from freehold.contract.orders import Kind, Order, Outcome, Report
from freehold.engine.device import PageBytes
from freehold.engine.storage_io import StorageIO
from freehold.store.store import Store


class PageMover:
    """Implements `contract.orders.Mover`. `device` copies pages of each cache group; the host has `page_counts` pages
    of each, and an unused page 0. Memory is touched only when written. With a `store`, pages are also copied there;
    orders stay with the store that they were given to. `about` describes stored pages of each group."""

    def __init__(
        self,
        device: Sequence[PageBytes],
        page_counts: Sequence[int],
        store: Store | None = None,
        about: Sequence[str] = (),
    ):
        self._device = device
        self._about = [one.encode() for one in about]
        self.host: list[UInt8] = [
            np.empty((count + 1, one.page_bytes), np.uint8) for one, count in zip(device, page_counts, strict=True)
        ]
        nothing = np.zeros(1, np.int32)
        for one, host in zip(device, self.host, strict=True):  # compile now, so that the first copies are not slower
            one.gather(nothing, host, nothing)
            one.scatter(nothing, host, nothing)
        self._copying = ThreadPoolExecutor(1, "kv-copy")  # one at a time
        self._reported = threading.Event()
        self.storage: StorageIO | None = None
        if store is not None:
            self.attach(store)

    def attach(self, store: Store) -> None:
        """Send storage orders to this store from now on."""
        assert self.storage is None
        self.storage = StorageIO(store, self.host, self._about)

    def detach(self) -> StorageIO | None:
        """Detach and return the storage. The caller closes it, which waits for its orders."""
        storage, self.storage = self.storage, None
        return storage

    def begin(self, order: Order, report: Report) -> None:
        def run(move: Callable[[Order], list[Bool]]) -> None:
            self._run(order, move, report)

        if order.kind is Kind.BACKUP:
            self._copying.submit(run, self._back_up)
        elif order.kind is Kind.LOAD:
            self._copying.submit(run, self._load)
        else:
            assert self.storage is not None
            self.storage.begin(order, run)

    def _run(self, order: Order, move: Callable[[Order], list[Bool]], report: Report) -> None:
        before = time.perf_counter()
        try:
            whole, error = move(order), None
        except BaseException as failure:  # an order must end, even after a failure
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

    def shutdown(self) -> None:
        """Drop queued orders."""
        self._copying.shutdown(wait=False, cancel_futures=True)
        if self.storage is not None:
            self.storage.abandon()


def _all(order: Order, whole: bool) -> list[Bool]:
    return [np.full(count, whole, np.bool_) for count in order.page_counts]
