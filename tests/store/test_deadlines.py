"""Each call of each store ends in time, whatever the server or the disk does, and the store works when that is over."""

import os
import random
import threading
import time

import pytest
from test_stores import MANY, at_most, item, payloads

from faulty_proxy import Fault, FaultyProxy
from freehold.store.disk import DiskStore
from freehold.store.object_store import ObjectStore
from freehold.store.redis_store import RedisStore
from freehold.store.store import StoreUnavailable

DEADLINE_S = 0.5
LONGEST_S = 1.1 * DEADLINE_S + 0.2  # for threads to get their turn
ITEMS = [item(n) for n in range(40)]
KEYS = [one.key for one in ITEMS]
CALLS = {
    "check": lambda store: store.check(DEADLINE_S),
    "contains": lambda store: store.contains(KEYS, DEADLINE_S),
    "get": lambda store: [one and bytes(one) for one in store.get(KEYS, DEADLINE_S)],
    "put": lambda store: store.put(ITEMS, DEADLINE_S),
    "clear": lambda store: store.clear(DEADLINE_S),
}


class Remote:
    """A store behind a proxy."""

    def __init__(self, kind: str, request):
        self._proxy = FaultyProxy(kind, request.getfixturevalue(f"{kind}_server").port)
        if kind == "redis":
            self.store = RedisStore(f"redis://127.0.0.1:{self._proxy.port}/0", MANY)
        else:
            self.store = ObjectStore("bucket", timeout=DEADLINE_S, endpoint=f"http://127.0.0.1:{self._proxy.port}")

    def spoil(self, fault: Fault | None) -> None:
        self._proxy.fault = fault

    def close(self) -> None:
        self._proxy.close()
        self.store.close()


class Disk:
    """A folder of which each system call has a fault."""

    NAMES = ("lstat", "pwrite", "preadv", "truncate", "unlink", "replace", "statvfs")

    def __init__(self, folder, patch):
        self.store = DiskStore(folder, 6000, free_floor_bytes=0, segment_bytes=2000)
        self._goes_on, self._fault = threading.Event(), None
        for name in self.NAMES:
            patch.setattr(os, name, lambda *given, real=getattr(os, name): self._call(real, given))  # noqa: B008

    def spoil(self, fault: Fault | None) -> None:
        self._goes_on.set()
        self._goes_on, self._fault = threading.Event(), fault

    def _call(self, real, given):
        match self._fault:
            case Fault.HANGS if real.__name__ != "preadv":  # that one holds its caller
                self._goes_on.wait()
            case Fault.DRIPS:
                self._goes_on.wait(0.1)
            case Fault.FAILS:
                raise OSError(5, "Input/output error")
            case Fault.NONSENSE if real.__name__ == "preadv":
                count = real(*given)
                given[1][0][:] = random.Random(0).randbytes(len(given[1][0]))
                return count
        return real(*given)

    def close(self) -> None:
        self.spoil(None)
        self.store.close()


@pytest.fixture(params=["disk", "redis", "s3"])
def place(request, tmp_path, monkeypatch):
    made = Disk(tmp_path, monkeypatch) if request.param == "disk" else Remote(request.param, request)
    yield made
    made.close()


@pytest.mark.parametrize("fault", Fault)
def test_a_call_ends_in_its_deadline_and_a_store_that_is_well_again_is_used(place, fault):
    store, wrong = place.store, []
    store.put(ITEMS, 10)
    for name, call in CALLS.items():
        place.spoil(fault)
        threads = [threading.Thread(target=suffer, args=(call, store, wrong)) for _ in range(6)]
        with at_most(LONGEST_S):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not wrong, name
        place.spoil(None)
        until_well(store, name)


def suffer(call, store, wrong):
    """What is said of a call that has a fault is a miss or an error, and never wrong."""
    try:
        answer = call(store)
    except StoreUnavailable:
        return
    except Exception as error:
        wrong += [] if call is CALLS["check"] and isinstance(error, ValueError) else [error]
        return
    if answer is not None:
        pairs = zip(answer, ITEMS, strict=True)
        wrong += [one for one, item in pairs if not isinstance(one, bool) and one not in (None, item.payload)]


def until_well(store, name):
    end = time.monotonic() + 5
    while True:
        try:
            store.put(ITEMS, 1)
            found = payloads(store, ITEMS)
        except StoreUnavailable:
            assert time.monotonic() < end, name
            continue
        kept = [one.payload for one in ITEMS]
        assert all(payload in (None, whole) for payload, whole in zip(found, kept, strict=True))
        if found[-1] is not None and True in store.contains(KEYS, 1):
            return
        assert time.monotonic() < end, name
