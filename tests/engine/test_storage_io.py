"""The threads that store and fetch, and storage that is exchanged under them."""

import threading
import time

import numpy as np
import pytest

from freehold.contract.errors import Conflict
from freehold.contract.orders import Kind, Order
from freehold.engine import storage_io
from freehold.engine.storage_io import StorageIO
from freehold.memory import CacheGroup, Memory, MemoryShape, PrefetchPolicy, TierPlan
from freehold.runtime import storage_backend
from freehold.runtime.storage_backend import Backend, StorageBackend
from freehold.runtime.tier_plan import open_storage
from freehold.store.disk import DiskStore
from freehold.store.store import StoreUnavailable
from freehold.store.upkeep import examine

KEYS = [[bytes([n]) * 32 for n in range(3)]]
PAGES = [np.array([1, 2, 3], np.int32)]


class Slow:
    """A store whose calls wait until they may go on."""

    def __init__(self, folder):
        self._store = DiskStore(folder, 1 << 20)
        self.gate = threading.Event()
        self.is_closed = False

    def put(self, items, deadline):
        assert self.gate.wait(10)
        assert not self.is_closed, "closed while it works"
        return self._store.put(items, deadline)

    def get(self, keys, deadline):
        return self._store.get(keys, deadline)

    def contains(self, keys, deadline):
        return self._store.contains(keys, deadline)

    def clear(self, deadline):
        self._store.clear(deadline)

    def close(self):
        self.is_closed = True
        self._store.close()


def begun(io, number, kind, pages=PAGES):
    """-> what becomes of the order, when it has come."""
    ended = []
    order = Order(number, kind, pages, keys=KEYS)
    io.begin(order, lambda move: ended.append(move(order)))
    return ended


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_closing_waits_for_what_was_begun(tmp_path):
    store, host = Slow(tmp_path), [np.arange(16, dtype=np.uint8).reshape(4, 4)]
    io = StorageIO(store, host)
    put = begun(io, 1, Kind.STORE)
    closing = threading.Thread(target=io.close)
    closing.start()
    time.sleep(0.05)  # nothing may happen
    assert not store.is_closed
    store.gate.set()
    closing.join(10)
    assert store.is_closed
    assert put[0][0].all()


def test_questions_wait_for_no_fetch_and_closing_for_none_that_is_queued(tmp_path):
    """All threads that fetch are busy, as with a server that is slow."""
    store, host = Slow(tmp_path), [np.zeros((4, 4), np.uint8)]
    reading, ended, said = threading.Event(), [], []

    def get(keys, deadline):
        assert reading.wait(10)
        return iter([None] * len(keys))

    def run(move, order):
        try:
            ended.append(move(order))
        except StoreUnavailable as error:
            said.append(str(error))

    store.get = get
    io = StorageIO(store, host)
    for number in range(64):
        order = Order(number, Kind.FETCH, PAGES, keys=KEYS)
        io.begin(order, lambda move, order=order: run(move, order))
    probed = begun(io, 99, Kind.PROBE)
    until(lambda: probed)
    closing = threading.Thread(target=io.close)
    closing.start()
    until(lambda: io._is_closing)
    reading.set()
    closing.join(10)
    assert len(ended) == storage_io.READERS
    assert said == ["the store is being closed"] * (64 - storage_io.READERS)


def test_what_was_stored_is_fetched_until_it_is_cleared(tmp_path):
    store, host = Slow(tmp_path), [np.arange(16, dtype=np.uint8).reshape(4, 4)]
    store.gate.set()
    io = StorageIO(store, host)
    put = begun(io, 1, Kind.STORE)
    until(lambda: put)
    before = host[0].copy()
    host[0][:] = 0
    fetched = begun(io, 2, Kind.FETCH)
    until(lambda: fetched)
    assert fetched[0][0].all()
    assert (host[0][1:] == before[1:]).all()
    io.clear().result(10)
    probed = begun(io, 3, Kind.PROBE)
    until(lambda: probed)
    assert not probed[0][0].any()
    io.close()


def test_what_was_refused_is_told_page_by_page(tmp_path):
    """Pages of one group are larger than the store."""
    host = [np.ones((4, 4000), np.uint8), np.ones((4, 40), np.uint8)]
    io = StorageIO(DiskStore(tmp_path, 2000, free_floor_bytes=0), host)
    order, ended = Order(1, Kind.STORE, [PAGES[0], PAGES[0]], keys=[KEYS[0], [b"%32d" % n for n in range(3)]]), []
    io.begin(order, lambda move: ended.append(move(order)))
    until(lambda: ended)
    assert [part.tolist() for part in ended[0]] == [[False] * 3, [True] * 3]
    io.close()


class Ending:
    """A store that fails behind so many entries."""

    def __init__(self, count):
        self._count = count

    def get(self, keys, deadline):
        for number, key in enumerate(keys):
            if number == self._count:
                raise StoreUnavailable("late")
            yield memoryview(bytes([key[0] + 1]) * 4)

    def close(self):
        """Nothing."""


@pytest.mark.parametrize("count", [1, 4, 5])
def test_what_has_come_before_a_store_fails_is_there(count):
    """A store that is too slow for an order gets on all the same."""
    host = [np.zeros((4, 4), np.uint8), np.zeros((4, 4), np.uint8)]
    io, ended = StorageIO(Ending(count), host), []
    order = Order(1, Kind.FETCH, [PAGES[0], PAGES[0]], keys=[KEYS[0], [bytes([n]) * 32 for n in range(3, 6)]])
    io.begin(order, lambda move: ended.append(move(order)))
    until(lambda: ended)
    assert np.concatenate(ended[0]).tolist() == [number < count for number in range(6)]
    assert [int(page[0]) for part in host for page in part[1:]] == [n + 1 if n < count else 0 for n in range(6)]
    io.close()


def test_a_store_that_fails_at_once_is_an_error():
    io, ended = StorageIO(Ending(0), [np.zeros((4, 4), np.uint8)]), []

    def run(move):
        with pytest.raises(StoreUnavailable, match="late"):
            move(Order(1, Kind.FETCH, PAGES, keys=KEYS))
        ended.append(True)

    io.begin(Order(1, Kind.FETCH, PAGES, keys=KEYS), run)
    until(lambda: ended)
    io.close()


# -- the backend that operators exchange --------------------------------------------------------------------------


class FakeMover:
    """Knows what is attached; moves nothing."""

    def __init__(self):
        self.storage = None

    def begin(self, order, report):
        """Never ends."""

    def wait(self, seconds):
        """Nothing comes."""

    def attach(self, store):
        self.storage = StorageIO(store, [np.zeros((65, 64), np.uint8)])

    def detach(self):
        storage, self.storage = self.storage, None
        return storage


@pytest.fixture
def backend():
    mover = FakeMover()
    plan = TierPlan((64,), (64,), (b"full",), b"one")
    memory = Memory(MemoryShape(64, 4, 8, 400, "lru", groups=(CacheGroup(),), step_tokens=16), plan, mover)
    return memory, mover, StorageBackend(memory, mover, None)


def place(folder):
    return Backend("file", str(folder), 1 << 20, PrefetchPolicy.TIMEOUT)


def settled(storage):
    until(lambda: storage.status()["state"] in ("attached", "detached"))
    return storage.status()


def test_storage_is_attached_cleared_and_detached(backend, tmp_path, monkeypatch):
    memory, mover, storage = backend
    may_open = threading.Event()

    def open_when_told(*where):
        assert may_open.wait(10)
        return open_storage(*where)

    monkeypatch.setattr(storage_backend, "open_storage", open_when_told)
    storage.attach(place(tmp_path))
    with pytest.raises(Conflict, match="attaching"):
        storage.attach(place(tmp_path))
    may_open.set()
    assert settled(storage)["hicache_storage_backend"] == "file"
    assert memory.tiers.storage is not None
    pages = memory.tiers.host.pages[0]
    pages.given.stored[1:] = True
    storage.clear()
    settled(storage)
    assert not pages.given.stored.any(), "what was cleared is stored again"
    storage.detach()
    assert settled(storage)["state"] == "detached"
    assert memory.tiers.storage is mover.storage is None
    storage.attach(place(tmp_path))  # its lock is free again
    assert settled(storage)["error"] is None
    storage.detach()
    settled(storage)


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_cleared_is_forgotten_though_nobody_asks(backend, tmp_path, fails):
    memory, mover, storage = backend
    storage.attach(place(tmp_path))
    settled(storage)
    gate, cleared = threading.Event(), threading.Event()

    def clear(deadline):
        assert gate.wait(10)
        cleared.set()
        if fails:
            raise StoreUnavailable("by half")

    mover.storage._store.clear = clear
    given = memory.tiers.host.pages[0].given
    given.stored[1:] = True
    storage.clear()
    assert not given.stored.any(), "what is being cleared may be gone"
    given.stored[1:4] = True  # fetched meanwhile
    gate.set()
    assert cleared.wait(10)
    until(lambda: storage.settle() or storage._work is None)
    assert not given.stored.any()
    storage.detach()
    settled(storage)


def test_what_failed_is_said(backend, tmp_path):
    memory, mover, storage = backend
    (tmp_path / "file").write_text("not a folder")
    storage.attach(place(tmp_path / "file"))
    status = settled(storage)
    assert status["state"] == "detached"
    assert "attaching failed" in status["error"]
    assert mover.storage is memory.tiers.storage is None
    storage.attach(place(tmp_path / "folder"))
    assert settled(storage)["error"] is None, "the next one begins anew"

    def fail(deadline):
        raise StoreUnavailable("out of reach")

    mover.storage._store.clear = fail
    storage.clear()
    assert "out of reach" in settled(storage)["error"]
    storage.detach()
    settled(storage)


def test_entries_say_what_they_are(tmp_path):
    store = DiskStore(tmp_path, 1 << 20, free_floor_bytes=0)
    io = StorageIO(store, [np.zeros((4, 4), np.uint8)], [b"llama, full"])
    put = begun(io, 1, Kind.STORE)
    until(lambda: put)
    assert {found.about for found in examine(store)} == {"llama, full"}
    io.close()
