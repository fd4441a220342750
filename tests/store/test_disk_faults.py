"""The disk store on a disk that fails: it says so, serves nothing wrong, and goes on when the disk does."""

import contextlib
import errno
import os
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
from test_disk_store import MANY, SECOND, crashed, item, opened, payloads

from freehold.store import disk
from freehold.store.disk import DiskStore
from freehold.store.store import StoreUnavailable

CALLS = (
    "open", "pwrite", "preadv", "pread", "truncate", "ftruncate", "unlink", "replace", "statvfs", "fstat", "listdir",
    "mkdir", "stat",
)  # fmt: skip


class FaultyDisk:
    """`os` of which calls fail, from the `first` on, `count` of them."""

    def __init__(self, first: int, count: int, number: int = errno.EIO):
        self._failing = range(first, first + count)
        self._number = number
        self.calls = 0

    @contextlib.contextmanager
    def plugged_in(self):
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, partial(self._call, getattr(os, name)))
            yield

    def _call(self, real, *given, **more):
        self.calls += 1
        if self.calls - 1 in self._failing:
            raise OSError(self._number, os.strerror(self._number))
        return real(*given, **more)


def use(store: DiskStore, stored: set[int]) -> None:
    """A day of a store; `stored` gets what it said to have, without what may have gone since."""
    for first in range(0, 40, 4):
        items = [item(n) for n in range(first, first + 4)]
        with contextlib.suppress(StoreUnavailable):
            store.put(items, SECOND)
            stored.update(range(first, first + 4))
        with contextlib.suppress(StoreUnavailable):
            for one, payload in zip(items, payloads(store, items), strict=True):
                assert payload in (None, one.payload)
    with contextlib.suppress(StoreUnavailable):
        store.discard([item(1).key])
    stored.discard(1)


@pytest.mark.parametrize(("count", "number"), [(1, errno.EIO), (6, errno.EIO), (1000, errno.ENOSPC)])
def test_whichever_call_fails_nothing_is_wrong_and_the_store_goes_on(tmp_path, count, number):
    whole = FaultyDisk(1 << 40, 0)
    with whole.plugged_in():
        store = opened(tmp_path / "whole")
        use(store, set())
        store.close()
    for first in range(0, whole.calls, 3 if count == 1 else 7):
        folder, stored = tmp_path / str(first), set[int]()
        store = None
        with FaultyDisk(first, count, number).plugged_in(), contextlib.suppress(StoreUnavailable):
            store = opened(folder)
            use(store, stored)
        store = store or opened(folder)  # no lock is left behind
        found = [n for n in range(40) if payloads(store, [item(n)]) == [item(n).payload]]
        # A read that fails is no miss for ever; on a full disk the oldest give way.
        assert number == errno.ENOSPC or stored <= {*found}, first
        more = [item(n) for n in range(100, 130)]
        store.put(more, SECOND)
        assert payloads(store, more) == [one.payload for one in more], "it goes on"
        crashed(store, tmp_path / "copy")
        store.close()
        for again in (opened(folder), opened(tmp_path / "copy")):
            assert payloads(again, more) == [one.payload for one in more]
            assert all(payloads(again, [item(n)]) == [item(n).payload] for n in found)
            again.close()
        for path in (tmp_path / "copy").iterdir():
            path.unlink()
        (tmp_path / "copy").rmdir()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_start_needs_nothing_to_be_written(tmp_path, monkeypatch, number):
    store, items = opened(tmp_path), [item(n) for n in range(20)]
    store.put(items, SECOND)
    crashed(store, tmp_path / "copy")

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    for name in ("truncate", "ftruncate", "pwrite", "replace", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    again = opened(tmp_path / "copy")
    assert payloads(again, items) == [one.payload for one in items]
    again.close()
    monkeypatch.undo()
    store.close()


def test_files_are_open_only_while_they_are_used(tmp_path):
    store = opened(tmp_path, segment_bytes=500)
    before = len(os.listdir("/proc/self/fd"))
    items = [item(n) for n in range(200)]
    store.put(items, SECOND)
    assert payloads(store, items) == [one.payload for one in items]
    assert len(list(tmp_path.glob("*.kv"))) >= 100
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    store.close()
    again = opened(tmp_path, segment_bytes=500)
    assert len(os.listdir("/proc/self/fd")) <= before
    again.close()


def test_a_failed_start_keeps_neither_lock_nor_file(tmp_path, monkeypatch):
    def fail(folder):
        raise OSError(errno.EIO, "Input/output error")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(disk, "numbers_in", fail)
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="Input/output"):
            opened(tmp_path)
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == before
    opened(tmp_path).close()


def test_a_file_that_can_not_be_deleted_keeps_its_entries(tmp_path, monkeypatch):
    store = opened(tmp_path, capacity=12_000)
    for number in range(20):
        store.put([item(number)], SECOND)
    before = [payloads(store, [item(n)]) for n in range(20)]

    def refuse(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(StoreUnavailable, match="not permitted"):
        store.put([item(n) for n in range(20, 60)], SECOND)
    with pytest.raises(StoreUnavailable, match="not permitted"):
        store.clear(SECOND)
    after = [payloads(store, [item(n)]) for n in range(20)]
    assert after == before, "no entry is forgotten, and none points nowhere"
    monkeypatch.undo()
    store.put([item(99)], SECOND)
    assert payloads(store, [item(99)]) == [item(99).payload]
    store.close()


def test_a_file_that_takes_no_more_is_left_for_another(tmp_path, monkeypatch):
    store, real = opened(tmp_path), os.pwrite
    store.put([item(1)], SECOND)
    broken = (tmp_path / "00000001.kv").stat().st_ino

    def write(file, parts, offset):
        if os.fstat(file).st_ino == broken:
            raise OSError(errno.EIO, "Input/output error")
        return real(file, parts, offset)

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(StoreUnavailable):
        store.put([item(2)], SECOND)
    store.put([item(3)], SECOND)
    assert payloads(store, [item(1), item(2), item(3)]) == [item(1).payload, None, item(3).payload]
    store.close()


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("is_asked", [False, True])
def test_entries_of_files_that_somebody_deletes_are_missed_and_written_again(tmp_path, is_read, is_asked):
    store = opened(tmp_path)
    store.put([item(n) for n in range(30)], SECOND)
    for path in tmp_path.glob("*.kv"):
        path.unlink()
    if is_read:
        assert payloads(store, [item(1), item(29)]) == [None, None]
    if is_asked:
        assert store.contains([item(n).key for n in range(30)], SECOND) == [False] * 30
    assert store.put([item(29), item(1), item(30)], SECOND) == [True] * 3
    store.close()
    again = opened(tmp_path)
    assert payloads(again, [item(1), item(29), item(30)]) == [item(n).payload for n in (1, 29, 30)]
    again.close()


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_folder_that_was_away_for_a_while_has_lost_nothing(tmp_path, is_empty):
    """As a disk that is unmounted: its mount point may be left, and is not written to."""
    folder, away = tmp_path / "kv", tmp_path / "away"
    store, items = opened(folder, capacity=6000, segment_bytes=1000), [item(n) for n in range(20)]
    store.put(items, SECOND)
    kept = [n for n in range(20) if payloads(store, [item(n)]) == [item(n).payload]]
    folder.rename(away)
    if is_empty:
        folder.mkdir()
    for call in (
        lambda: payloads(store, [item(kept[0])]), lambda: store.put([item(n) for n in range(30, 60)], SECOND),
        lambda: store.contains([item(kept[0]).key], SECOND), lambda: store.put([item(kept[0])], SECOND),
        lambda: store.discard([item(kept[0]).key]), lambda: store.clear(SECOND),
    ):  # fmt: skip
        with pytest.raises(StoreUnavailable, match="not where it was"):
            call()
    if is_empty:
        folder.rmdir()  # nothing is in it
    away.rename(folder)
    assert [n for n in kept if payloads(store, [item(n)]) == [item(n).payload]] == kept
    store.put([item(99)], SECOND)
    assert payloads(store, [item(99)]) == [item(99).payload]
    store.close()


def test_the_index_takes_as_much_memory_as_is_said(tmp_path):
    count = 20_000
    store = DiskStore(tmp_path, MANY, free_floor_bytes=0, segment_bytes=1 << 20)
    store.put([item(n, 10) for n in range(count)], 60 * SECOND)
    store.close()
    tracemalloc.start()
    again = DiskStore(tmp_path, MANY, free_floor_bytes=0)
    taken = tracemalloc.get_traced_memory()[0] / count
    tracemalloc.stop()
    again.close()
    assert 100 < taken < 220, f"{taken:.0f} bytes an entry"


def test_names_of_other_things_do_not_stop_a_start(tmp_path):
    (tmp_path / "00000001-copy.kv").write_bytes(b"")
    (tmp_path / "00000002.kv").mkdir()
    (tmp_path / "00000003.kv").symlink_to(Path("/nowhere"))
    os.mkfifo(tmp_path / "00000004.kv")
    os.mkfifo(tmp_path / "00000005.idx")
    (tmp_path / "00000006.idx").mkdir()
    store = opened(tmp_path)
    store.put([item(n) for n in range(40)], SECOND)
    assert payloads(store, [item(0)]) == [item(0).payload]
    store.close()
