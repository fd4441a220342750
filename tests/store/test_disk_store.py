"""The disk store: what is served is what was written, whatever happened to the files."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from freehold.store.disk import DiskStore
from freehold.store.entry import HEADER_BYTES, decode, description
from freehold.store.segment import Segment
from freehold.store.store import Item, StoreUnavailable

SECOND = 1.0
MANY = 1 << 40


def item(number: int, size: int = 300) -> Item:
    payload = np.random.default_rng(number).bytes(size)
    return Item(number.to_bytes(32, "little"), b'{"tokens": 16}', payload)


def opened(folder, capacity: int = MANY, **options) -> DiskStore:
    return DiskStore(folder, capacity, free_floor_bytes=0, **{"segment_bytes": 4000, **options})


def payloads(store: DiskStore, items: list[Item]) -> list[bytes | None]:
    found = store.get([one.key for one in items], SECOND)
    return [None if payload is None else bytes(payload) for payload in found]


def crashed(store: DiskStore, to) -> None:
    """The files as a process leaves them that is killed now."""
    shutil.copytree(store.folder, to)


@pytest.fixture
def store(tmp_path):
    store = opened(tmp_path / "store")
    yield store
    store.close()


def test_entries_are_found_again_after_a_restart(store, tmp_path):
    items = [item(n) for n in range(40)]
    assert all(store.put(items, SECOND))
    assert payloads(store, items) == [one.payload for one in items]
    store.close()
    again = opened(tmp_path / "store")
    assert payloads(again, [*items, item(99)]) == [*(one.payload for one in items), None]
    assert again.contains([items[3].key, item(99).key], SECOND) == [True, False]
    assert description(again.raw(items[3].key)) == b'{"tokens": 16}'
    assert list(again.all_keys()) == [one.key for one in items]
    again.close()


def test_an_entry_is_written_once(store):
    store.put([item(1)], SECOND)
    before = store.stats()
    assert store.put([item(1)], SECOND) == [True]
    assert store.stats() == before


def test_what_was_written_before_a_crash_is_there(store, tmp_path):
    items = [item(n) for n in range(30)]
    for number, one in enumerate(items):
        store.put([one], SECOND)
        crashed(store, tmp_path / f"after-{number}")
        again = opened(tmp_path / f"after-{number}")
        assert payloads(again, items) == [one.payload for one in items[: number + 1]] + [None] * (29 - number)
        again.close()


def test_an_entry_that_is_cut_anywhere_is_not_there_and_those_before_it_are(store, tmp_path):
    items = [item(n, 50) for n in range(3)]
    store.put(items, SECOND)
    length = store.stats().bytes
    for cut in range(length):
        crashed(store, folder := tmp_path / f"cut-{cut}")
        os.truncate(folder / "00000001.kv", cut)
        again = opened(folder)
        whole = cut // (length // 3)
        assert again.contains([one.key for one in items], SECOND) == [n < whole for n in range(3)]
        assert payloads(again, items) == [one.payload for one in items[:whole]] + [None] * (3 - whole)
        assert again.put([item(7)], SECOND) == [True]
        assert payloads(again, [item(7)]) == [item(7).payload]
        again.close()
        shutil.rmtree(folder)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_flipped_bit_is_a_miss_and_never_other_bytes(store, tmp_path, is_sealed):
    items = [item(n, 40) for n in range(4)]
    store.put(items, SECOND)
    if is_sealed:
        store.close()
    else:
        crashed(store, tmp_path / "copy")
    source = tmp_path / "store" if is_sealed else tmp_path / "copy"
    for name in sorted(path.name for path in source.iterdir() if path.suffix in (".kv", ".idx")):
        for at in range((source / name).stat().st_size):
            shutil.copytree(source, folder := tmp_path / "flipped")
            raw = bytearray((folder / name).read_bytes())
            raw[at] ^= 1 << at % 8
            (folder / name).write_bytes(raw)
            again = opened(folder)
            for payload, one in zip(payloads(again, items), items, strict=True):
                assert payload in (None, one.payload)
            if name.endswith(".idx"):
                assert payloads(again, items) == [one.payload for one in items], "the file itself is whole"
            again.close()
            shutil.rmtree(folder)


def test_what_follows_damage_is_found_at_the_next_start(store, tmp_path):
    """Whatever is damaged, all other entries are there."""
    items = [item(n, 40) for n in range(5)]
    store.put(items, SECOND)
    length = store.stats().bytes
    for at in range(0, length, 3):
        crashed(store, folder := tmp_path / "damaged")
        raw = bytearray((folder / "00000001.kv").read_bytes())
        raw[at] ^= 0x55
        (folder / "00000001.kv").write_bytes(raw)
        again = opened(folder)
        hit = at // (length // 5)
        assert payloads(again, items) == [None if n == hit else one.payload for n, one in enumerate(items)]
        again.close()
        shutil.rmtree(folder)


def test_damage_is_counted_and_the_entry_can_be_written_again(store):
    store.put([item(1), item(2)], SECOND)
    path = store.folder / "00000001.kv"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert payloads(store, [item(1), item(2)]) == [item(1).payload, None]
    assert store.stats().damaged == 1
    assert store.put([item(2)], SECOND) == [True]
    assert payloads(store, [item(2)]) == [item(2).payload]


def test_an_entry_under_another_key_is_not_served(store):
    """Two entries of one length change places."""
    store.put([item(1), item(2)], SECOND)
    path = store.folder / "00000001.kv"
    raw, half = path.read_bytes(), store.stats().bytes // 2
    path.write_bytes(raw[half:] + raw[:half])
    assert payloads(store, [item(1), item(2)]) == [None, None]


def test_the_oldest_go_when_it_is_full_and_those_that_are_read_stay(tmp_path):
    store = opened(tmp_path, capacity=20_000)
    size = HEADER_BYTES + 14 + 300
    for number in range(200):
        assert store.put([item(number)], SECOND) == [True]
        assert payloads(store, [item(0)]) == [item(0).payload], "it is read all the time"
        stats = store.stats()
        assert stats.bytes is not None
        assert stats.entries is not None
        assert stats.bytes <= 20_000
        assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) == stats.bytes
        assert stats.entries + stats.evicted == number + 1
    assert payloads(store, [item(1), item(199)]) == [None, item(199).payload]
    assert (stats.entries or 0) > 20_000 // size // 2
    store.close()
    again = opened(tmp_path, capacity=20_000)
    assert payloads(again, [item(0), item(1), item(199)]) == [item(0).payload, None, item(199).payload]
    again.close()


def test_what_is_larger_than_the_store_is_dropped(tmp_path):
    store = opened(tmp_path, capacity=1000)
    assert store.put([item(1, 2000), item(2)], SECOND) == [False, True]
    assert (store.stats().dropped, store.stats().entries) == (1, 1)
    store.close()


def test_nothing_is_written_below_the_free_floor(tmp_path):
    store = DiskStore(tmp_path, MANY, free_floor_bytes=MANY)
    assert store.put([item(1)], SECOND) == [False]
    assert store.stats().dropped == 1
    store.close()


def test_a_full_disk_is_an_error_and_leaves_nothing_behind(store, monkeypatch):
    store.put([item(1)], SECOND)
    real = os.pwrite

    def full(file, parts, offset):
        real(file, parts[:10], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    before = store.stats()
    with pytest.raises(StoreUnavailable, match="No space left"):
        store.put([item(2)], SECOND)
    monkeypatch.undo()
    assert store.stats() == before
    assert (store.folder / "00000001.kv").stat().st_size == before.bytes
    assert store.put([item(3)], SECOND) == [True]
    assert payloads(store, [item(1), item(2), item(3)]) == [item(1).payload, None, item(3).payload]


def test_a_short_write_goes_on(store, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, parts, offset: real(file, parts[:7], offset))
    store.put([item(1)], SECOND)
    monkeypatch.undo()
    assert payloads(store, [item(1)]) == [item(1).payload]


def test_a_folder_has_one_writer_and_any_reader(store):
    store.put([item(1)], SECOND)
    with pytest.raises(StoreUnavailable, match="in use by another process"):
        opened(store.folder)
    reader = opened(store.folder, is_read_only=True)
    assert payloads(reader, [item(1)]) == [item(1).payload]
    reader.close()


def test_a_folder_that_is_none_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="that is no folder"):
        opened(tmp_path / "file")


def test_a_deadline_ends_a_call(store, monkeypatch):
    items = [item(n) for n in range(50)]
    store.put(items, SECOND)
    slow = store._read
    monkeypatch.setattr(store, "_read", lambda entry, buffer: time.sleep(0.02) or slow(entry, buffer))
    with pytest.raises(StoreUnavailable, match=r"within 0.1 s"):
        list(store.get([one.key for one in items], 0.1))


def test_an_index_of_a_longer_file_is_not_believed(store):
    """As after a loss of power."""
    items = [item(n) for n in range(4)]
    store.put(items, SECOND)
    length = store.stats().bytes
    store.close()
    os.truncate(store.folder / "00000001.kv", length - 1)
    again = opened(store.folder)
    assert again.contains([one.key for one in items], SECOND) == [True, True, True, False]
    again.close()


def test_a_segment_that_is_deleted_while_it_is_read_is_read_to_the_end(store, monkeypatch):
    store.put([item(1)], SECOND)
    real = os.preadv

    def late(*arguments):
        store.clear(SECOND)
        with open(os.devnull, "rb"):  # it would get the number of a file that was closed
            return real(*arguments)

    monkeypatch.setattr(os, "preadv", late)
    assert payloads(store, [item(1)]) == [item(1).payload]
    monkeypatch.undo()
    assert payloads(store, [item(1)]) == [None]
    assert store.stats().damaged == 0


def test_a_segment_that_is_deleted_before_it_is_read_is_a_miss(store, monkeypatch):
    store.put([item(1)], SECOND)
    real = Segment.read

    def late(self, place, buffer):
        store.clear(SECOND)
        return real(self, place, buffer)

    monkeypatch.setattr(Segment, "read", late)
    assert payloads(store, [item(1)]) == [None]
    assert store.stats().damaged == 0


def test_entries_are_read_while_another_one_is_written(store, monkeypatch):
    store.put([item(1)], SECOND)
    real, seen = os.pwrite, []

    def slow(file, parts, offset):
        seen.append(payloads(store, [item(1), item(2)]))
        return real(file, parts, offset)

    monkeypatch.setattr(os, "pwrite", slow)
    store.put([item(2)], SECOND)
    monkeypatch.undo()
    assert seen == [[item(1).payload, None]]
    assert payloads(store, [item(2)]) == [item(2).payload]


def test_readers_and_a_writer_that_evicts_under_them(tmp_path):
    """A segment that goes while it is read is read to the end."""
    store, stop = opened(tmp_path, capacity=20_000), threading.Event()
    wrong: list[int] = []

    def read() -> None:
        rng = np.random.default_rng()
        while not stop.is_set():
            number = int(rng.integers(0, 400))
            if payloads(store, [item(number)])[0] not in (None, item(number).payload):
                wrong.append(number)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(400):
        store.put([item(number)], SECOND)
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert store.stats().damaged == 0
    store.close()


WRITER = """
    import sys
    sys.path.insert(0, sys.argv[2])
    from pathlib import Path
    from test_disk_store import item, opened
    store = opened(Path(sys.argv[1]), capacity=60_000)
    number = int(sys.argv[3])
    while True:
        store.put([item(number)], 1.0)
        print(number, flush=True)
        number += 1
"""


@pytest.mark.thorough
def test_a_writer_is_killed_again_and_again(tmp_path):
    """Whatever it had said to have written is there at the next start, or has been evicted; nothing is wrong."""
    rng, number = np.random.default_rng(0), 0
    for _ in range(12):
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path), os.path.dirname(__file__), str(number)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines = [process.stdout.readline() for _ in range(int(rng.integers(20, 120)))]
        process.send_signal(signal.SIGKILL)
        rest, _ = process.communicate()
        last = int([*lines, *rest.rpartition("\n")[0].splitlines()][-1])
        store = opened(tmp_path, capacity=60_000)
        assert payloads(store, [item(last)]) == [item(last).payload]
        for old in range(last + 1):
            assert payloads(store, [item(old)])[0] in (None, item(old).payload)
        assert store.stats().damaged == 0
        store.close()
        number = last + 2


class Files(RuleBasedStateMachine):
    """Any order of writing, reading, restarts, crashes and damage."""

    @initialize()
    def begin(self):
        import tempfile

        self.root = tempfile.mkdtemp(prefix="freehold-")
        self.copies = 0
        self.store = opened(self._folder())
        self.written: dict[int, bool] = {}  # whether it must be found

    def _folder(self):
        from pathlib import Path

        return Path(self.root) / str(self.copies)

    @rule(number=st.integers(0, 30), size=st.sampled_from([0, 1, 40, 900, 5000]))
    def put(self, number, size):
        first = self.written.setdefault(number, True)
        if first is True:
            self.sizes = getattr(self, "sizes", {})
            self.sizes.setdefault(number, size)
        assert self.store.put([item(number, self.sizes[number])], SECOND) == [True]
        self.written[number] = True

    @rule()
    def restart(self):
        self.store.close()
        self.store = opened(self._folder())

    @rule()
    def crash(self):
        old = self._folder()
        self.copies += 1
        shutil.copytree(old, self._folder())
        self.store.close()
        shutil.rmtree(old)
        self.store = opened(self._folder())

    @rule(data=st.data())
    def damage(self, data):
        paths = sorted(path for path in self._folder().glob("*.kv") if path.stat().st_size)
        if not paths:
            return
        path = data.draw(st.sampled_from(paths))
        at = data.draw(st.integers(0, path.stat().st_size - 1))
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << at % 8]))
        self.written = dict.fromkeys(self.written, False)

    @invariant()
    def what_is_served_was_written(self):
        if not hasattr(self, "store"):
            return
        for number, must in self.written.items():
            expected = item(number, self.sizes[number])
            (payload,) = payloads(self.store, [expected])
            assert payload == expected.payload or (payload is None and not must)

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.root)


TestFiles = Files.TestCase
TestFiles.settings = settings(max_examples=60, stateful_step_count=25)


@given(st.binary(max_size=200), st.binary(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_any_bytes_come_back(tmp_path, payload, about):
    store = DiskStore(tmp_path / "any", MANY, free_floor_bytes=0)
    store.clear(SECOND)
    key = bytes(32)
    store.put([Item(key, about, payload)], SECOND)
    assert (description(store.raw(key)), decode(key, store.raw(key))) == (about, payload)
    store.close()


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_asked_for_outlives_what_is_written_and_forgotten(tmp_path, asked):
    """A prefix that is always on the device is never read from the disk."""
    store = opened(tmp_path, 20_000)
    system = [item(number) for number in range(8)]
    store.put(system, SECOND)
    for number in range(100, 400):
        if asked:
            store.contains([one.key for one in system], SECOND)
        store.put([item(number)], SECOND)
    assert store.contains([one.key for one in system], SECOND) == [asked] * 8
