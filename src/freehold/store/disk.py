"""Entries on a disk: append-only segments (log-structured; Rosenblum and Ousterhout 1992)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from freehold.store.entry import Damaged, Raw, decode, encode
from freehold.store.lane import Lane, until_failure
from freehold.store.segment import Buffer, NotASegment, Segment, numbers_in, strangers_in
from freehold.store.store import Item, StoreStats, StoreUnavailable

SEGMENT_BYTES = 64 << 20
BATCH_BYTES = 1 << 20  # entries written by one call, approximately
FREE_FLOOR_BYTES = 1 << 30
CLOSE_S = 5.0
DISCARD_S = 3600.0
_NUMBER_BITS = 32  # of an entry in its segment
_FULL = {errno.ENOSPC, errno.EDQUOT}


class DiskStore:
    """A folder of segments, with an index of all entries in memory: about 200 bytes each. One file is open at a time
    for writing, and one for each entry being read.

    An entry is appended once, and found only when all of it is written. A partial entry left by a crash at the end of a
    segment is cut off at the next start, and each start begins a new segment. When the store is full, the oldest
    segment is deleted. Its entries read or asked for since they were written move to the newest segment (a second
    chance, as in CLOCK): at most the size of a segment for each entry written.

    One process writes to a folder: another one is refused. Other files in the folder are left as they are. A folder
    that disappears for a while has lost nothing when it returns. Raises StoreUnavailable.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        free_floor_bytes: int = FREE_FLOOR_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        is_read_only: bool = False,
    ):
        self.folder = folder
        self._capacity, self._floor = capacity_bytes, free_floor_bytes
        self._segment_bytes = min(segment_bytes, max(capacity_bytes // 4, 1))
        self._is_read_only = is_read_only
        self._asking, self._writing = Lane(f"{folder}", 1), Lane(f"{folder}", 1)
        self._lock = threading.Lock()  # of the index
        self._damaged = self._dropped = self._evicted = 0
        self._segments: dict[int, Segment] = {}  # oldest first
        self._index: dict[bytes, int] = {}  # the number of a segment, and of the entry in it
        self._open_segment: Segment | None = None
        self._newest = 0
        self._lock_file: int | None = None
        with self._told(), contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if is_read_only and not folder.is_dir():
                raise StoreUnavailable(f"{folder}: there is no such folder")
            if not is_read_only:
                if folder.exists() and not folder.is_dir():
                    raise StoreUnavailable(f"{folder}: that is no folder")
                folder.mkdir(parents=True, exist_ok=True)
                self._lock_file = _locked(folder)
            self._inode = os.stat(folder).st_ino
            numbers, self._newest = numbers_in(folder)
            undo.pop_all()
        for number in numbers:
            with contextlib.suppress(OSError, NotASegment):  # an unreadable segment counts as missing
                self._take_up(Segment.found(folder, number))

    def _take_up(self, segment: Segment) -> None:
        if segment.bytes == 0 and not self._is_read_only:
            segment.delete()
            return
        self._segments[segment.number] = segment
        self._index.update((key, _entry(segment, number)) for number, key in enumerate(segment.keys))
        if not segment.is_sealed and not self._is_read_only:
            segment.seal()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Raise StoreUnavailable for system errors."""
        try:
            yield
        except OSError as error:
            raise StoreUnavailable(f"{self.folder}: {error.strerror or error}") from error

    def _check_there(self) -> None:
        """Raise StoreUnavailable unless the opened folder is at its path. While its disk is not mounted, missing files
        are not deleted files, and another folder there is not locked."""
        with self._told(), contextlib.suppress(FileNotFoundError):
            if os.stat(self.folder).st_ino == self._inode:
                return
        raise StoreUnavailable(f"{self.folder} is not where it was")

    # -- reading --------------------------------------------------------------------------------------

    def check(self, deadline: float) -> None:
        """Do nothing: opening the folder was the test."""

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self._look_after(keys, deadline)
        with self._lock:
            entries = [self._index.get(key) for key in keys]
            for entry in entries:
                if entry is not None:
                    segment, number = self._of(entry)
                    segment.is_used[number] = True
        return [entry is not None for entry in entries]

    def _look_after(self, keys: Collection[bytes], deadline: float) -> None:
        """Forget entries of `keys` in segments whose file was deleted from outside."""
        with self._lock:
            found = [self._of(entry)[0] for key in keys if (entry := self._index.get(key)) is not None]
        segments = {segment.number: segment for segment in found}
        with self._told():
            gone = self._asking.run(lambda: [one for one in segments.values() if one.is_gone()], deadline)
        if gone:
            self._check_there()
        for segment in gone:
            self._lose(segment)

    def _lose(self, segment: Segment) -> None:
        with self._lock:
            for number in self._live(segment):
                del self._index[segment.keys[number]]

    def get(self, keys: Sequence[bytes], deadline: float) -> Iterator[memoryview | None]:
        # Read by the caller's thread: data read by another thread is not in this one's CPU cache, which halves the
        # speed. A read that hangs holds its caller.
        end, buffer = time.monotonic() + deadline, Buffer()
        for number, key in enumerate(keys):
            if time.monotonic() > end:
                raise StoreUnavailable(f"{self.folder}: {number} of {len(keys)} entries within {deadline:g} s")
            yield self._get(key, buffer)

    def _get(self, key: bytes, buffer: Buffer) -> memoryview | None:
        if (entry := self._index.get(key)) is None:
            return None
        raw = self._read(entry, buffer)
        payload, damage = None, False
        try:
            payload = None if raw is None else decode(key, raw)
        except Damaged:
            damage = True
        with self._lock:
            self._damaged += damage
            if self._index.get(key) != entry:
                return payload  # its segment was deleted meanwhile
            if payload is None:
                del self._index[key]
            else:
                segment, number = self._of(entry)
                segment.is_used[number] = True
        return payload

    def _of(self, entry: int) -> tuple[Segment, int]:
        """Return the segment, and the number in it. Raise KeyError."""
        return self._segments[entry >> _NUMBER_BITS], entry & ((1 << _NUMBER_BITS) - 1)

    def _read(self, entry: int, buffer: Buffer) -> memoryview | None:
        """Return the bytes of an entry, in the buffer. Return None if its segment is gone."""
        with self._told(), contextlib.suppress(KeyError, FileNotFoundError):
            segment, number = self._of(entry)
            return segment.read(segment.place(number), buffer)
        self._check_there()
        return None

    def all_keys(self) -> Iterator[bytes]:
        """Return all keys, oldest first."""
        with self._lock:
            return iter(list(self._index))

    def foreign(self) -> Iterator[str]:
        with self._told():
            yield from strangers_in(self.folder, set(self._segments))

    def raw(self, key: bytes) -> bytes | None:
        entry = self._index.get(key)
        found = None if entry is None else self._read(entry, Buffer())
        return None if found is None else bytes(found)

    # -- writing --------------------------------------------------------------------------------------

    def put(self, items: Sequence[Item], deadline: float) -> list[bool]:
        end = time.monotonic() + deadline
        self._look_after([item.key for item in items], deadline)
        new = {item.key: item for item in items if item.key not in self._index}
        with self._told():
            until_failure(self._writing.each(self._batches(new.values()), end - time.monotonic()))
        with self._lock:
            stored = [item.key in self._index for item in items]
            self._dropped += stored.count(False)
        return stored

    def _batches(self, items: Iterable[Item]) -> Iterator[Callable[[], None]]:
        """Yield calls that write `items`, several at once. The caller's thread encodes them: a late call must not read
        the caller's memory."""
        limit = min(BATCH_BYTES, self._segment_bytes)
        keys, sizes, parts, total = list[bytes](), list[int](), list[Raw](), 0
        for item in items:
            entry = encode(*item)
            keys.append(item.key)
            sizes.append(sum(memoryview(part).nbytes for part in entry))
            parts += entry
            total += sizes[-1]
            if total >= limit:
                yield partial(self._put, keys, sizes, b"".join(parts))
                keys, sizes, parts, total = [], [], [], 0
        if keys:
            yield partial(self._put, keys, sizes, b"".join(parts))

    def _put(self, keys: Sequence[bytes], sizes: Sequence[int], raw: Raw) -> None:
        self._check_there()
        try:
            if self._make_room(len(raw)):
                self._append(keys, sizes, raw)
        except OSError as error:
            self._give_way(error)
            raise

    def _append(self, keys: Sequence[bytes], sizes: Sequence[int], raw: Raw) -> None:
        """Append entries that lie one after another in `raw`. Raise OSError, having added none."""
        segment = self._writable()
        first = segment.append(keys, sizes, raw)
        with self._lock:
            self._index.update((key, _entry(segment, first + number)) for number, key in enumerate(keys))

    def _writable(self) -> Segment:
        """Return the segment to append to. Raise OSError."""
        if self._open_segment is not None and self._open_segment.bytes >= self._segment_bytes:
            self._seal()
        elif self._open_segment is not None and self._open_segment.is_gone():
            self._lose(self._open_segment)
            self._seal()
        if self._open_segment is None:
            self._newest += 1
            segment = self._open_segment = Segment.created(self.folder, self._newest)
            with self._lock:
                self._segments[segment.number] = segment
        return self._open_segment

    def _seal(self) -> None:
        """Close the open segment for writing."""
        segment, self._open_segment = self._open_segment, None
        if segment is not None and segment.bytes > 0:
            segment.seal()
        elif segment is not None:
            with contextlib.suppress(OSError):
                self._forget(segment)

    def _give_way(self, error: OSError) -> None:
        """Recover from an error: the next entry goes to another file; on a full disk, the oldest segment is deleted."""
        self._seal()
        if error.errno in _FULL and len(self._segments) > 1:
            with contextlib.suppress(OSError):
                self._forget(next(iter(self._segments.values())))

    def _make_room(self, size: int) -> bool:
        """Delete old segments until `size` bytes may be written. Return whether they may. Raise OSError."""
        second_chances = self._segment_bytes
        while self._bytes + size > self._capacity or _free_bytes(self.folder) - size < self._floor:
            oldest = next(iter(self._segments.values()), None)
            if oldest is None or oldest is self._open_segment:
                return False
            second_chances -= self._evict(oldest, second_chances)
        return True

    def _evict(self, segment: Segment, room: int) -> int:
        """Delete a segment, saving used entries of up to `room` bytes. Return the bytes saved."""
        kept = self._still_used(segment, room)
        self._evicted += len(self._forget(segment)) - len(kept)
        for key, raw in kept:
            self._append([key], [len(raw)], raw)
        return sum(len(raw) for _, raw in kept)

    def _still_used(self, segment: Segment, room: int) -> list[tuple[bytes, bytes]]:
        """Return keys and bytes of the entries that get a second chance."""
        kept: list[tuple[bytes, bytes]] = []
        for number in self._live(segment):
            place, key = segment.place(number), segment.keys[number]
            if segment.is_used[number] and place.size <= room:
                with contextlib.suppress(OSError, Damaged):
                    raw = bytes(segment.read(place, Buffer()))
                    decode(key, raw)
                    kept.append((key, raw))
                    room -= place.size
        return kept

    def _forget(self, segment: Segment) -> list[int]:
        """Delete a segment. Return its live entries. Raise OSError, having changed nothing."""
        segment.delete()
        with self._lock:
            del self._segments[segment.number]
            live = self._live(segment)
            for number in live:
                del self._index[segment.keys[number]]
        return live

    def _live(self, segment: Segment) -> list[int]:
        """Return the entries that were not rewritten since."""
        return [number for number, key in enumerate(segment.keys) if self._index.get(key) == _entry(segment, number)]

    def discard(self, keys: Collection[bytes]) -> None:
        with self._told():
            self._writing.run(partial(self._discard, keys), DISCARD_S)

    def _discard(self, keys: Collection[bytes]) -> None:
        """Delete the segments of `keys`, after rewriting their other entries: segments never change."""
        self._check_there()
        with self._lock:
            found = [entry for key in keys if (entry := self._index.pop(key, None)) is not None]
        touched = list({segment.number: segment for segment, _ in map(self._of, found)}.values())
        if self._open_segment in touched:
            self._seal()
        for segment in touched:
            for number in self._live(segment):
                raw = segment.read(segment.place(number), Buffer())
                self._append([segment.keys[number]], [len(raw)], raw)
            self._forget(segment)

    @property
    def _bytes(self) -> int:
        return sum(segment.bytes for segment in self._segments.values())

    def clear(self, deadline: float) -> None:
        with self._told():
            self._writing.run(self._clear, deadline)

    def _clear(self) -> None:
        self._check_there()
        for segment in list(self._segments.values()):
            self._forget(segment)
            if segment is self._open_segment:
                self._open_segment = None

    # -- the whole ------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                len(self._index), self._bytes, self._capacity, self._damaged, self._dropped, self._evicted
            )

    def close(self) -> None:
        """Seal the open segment, so that the next start need not scan it. A store that was not closed loses nothing."""
        with contextlib.suppress(StoreUnavailable):  # a hanging disk may finish later
            self._writing.run(self._close, CLOSE_S)
        self._asking.close()
        self._writing.close()

    def _close(self) -> None:
        self._seal()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None


def _entry(segment: Segment, number: int) -> int:
    """Pack both numbers into one: such an index takes less memory."""
    return segment.number << _NUMBER_BITS | number


def _locked(folder: Path) -> int:
    """Take a lock that ends with the process, however it ends. Raise StoreUnavailable or OSError."""
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise StoreUnavailable(f"{folder} is in use by another process: give each server a folder of its own") from None
    return file


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
