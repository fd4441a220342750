"""Entries on a disk: segments that are only appended to (log-structured; Rosenblum and Ousterhout 1992)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from freehold.store.entry import Damaged, Raw, decode, encode
from freehold.store.segment import Buffer, Place, Segment
from freehold.store.store import Item, StoreStats, StoreUnavailable

SEGMENT_BYTES = 64 << 20
FREE_FLOOR_BYTES = 1 << 30


class DiskStore:
    """A folder of segments, with an index of all entries in memory: about 150 bytes each.

    An entry is written once, behind the others, and found only when all of it is written. What a crash leaves of one at
    the end of a segment is cut off at the next start, and each start begins a new segment. When the store is full, the
    oldest segment goes; entries of it that were read since they were written move to the newest one, as far as they are
    less than half of it (a second chance, as in CLOCK).

    One process writes to a folder: another one is refused. Raises StoreUnavailable.
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
        self._writing = threading.Lock()  # who writes has this one, and the other for moments
        self._lock = threading.Lock()  # of the index
        self._damaged = self._dropped = self._evicted = 0
        self._segments: dict[int, Segment] = {}  # oldest first
        self._places: dict[bytes, Place] = {}
        self._used: set[bytes] = set()  # read since they were written
        self._open_segment: Segment | None = None
        self._newest = 0
        try:
            if is_read_only and not folder.is_dir():
                raise StoreUnavailable(f"{folder}: there is no such folder")
            if not is_read_only:
                folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = None if is_read_only else _locked(folder)
            for path in sorted(folder.glob("[0-9]*.kv")):
                self._newest = int(path.stem)
                self._take_up(Segment(folder, int(path.stem), is_read_only=is_read_only))
        except OSError as error:
            raise StoreUnavailable(f"{folder}: {error.strerror or error}") from error

    def _take_up(self, segment: Segment) -> None:
        if segment.bytes == 0 and not self._is_read_only:
            segment.delete()
            return
        self._segments[segment.number] = segment
        self._places.update(segment.places)
        if not segment.is_sealed and not self._is_read_only:
            segment.seal()

    # -- reading --------------------------------------------------------------------------------------

    def check(self, deadline: float) -> None:
        """Opening the folder has tried it."""

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        with self._lock:
            return [key in self._places for key in keys]

    def get(self, keys: Sequence[bytes], deadline: float) -> Iterator[memoryview | None]:
        end, buffer = time.monotonic() + deadline, Buffer()
        for number, key in enumerate(keys):
            if time.monotonic() > end:
                raise StoreUnavailable(f"{self.folder}: {number} of {len(keys)} entries read in {deadline:g} s")
            yield self._get(key, buffer)

    def _get(self, key: bytes, buffer: Buffer) -> memoryview | None:
        raw = self._read(key, buffer)
        if raw is None:
            return None
        try:
            payload = decode(key, raw)
        except Damaged:
            with self._lock:
                self._damaged += 1
                self._places.pop(key, None)
            return None
        with self._lock:
            self._used.add(key)
        return payload

    def _read(self, key: bytes, buffer: Buffer) -> memoryview | None:
        """The bytes of an entry, in the buffer. Its segment may be deleted meanwhile, by others."""
        with self._lock:
            if (place := self._places.get(key)) is None:
                return None
            segment = self._segments[place.segment]
            segment.borrow()
        try:
            return segment.read(place, buffer)
        except OSError as error:
            raise StoreUnavailable(f"{self.folder}: {error.strerror or error}") from error
        finally:
            with self._lock:
                segment.give_back()

    def all_keys(self) -> Iterator[bytes]:
        """Oldest first."""
        with self._lock:
            return iter(list(self._places))

    def raw(self, key: bytes) -> bytes | None:
        found = self._read(key, Buffer())
        return None if found is None else bytes(found)

    # -- writing --------------------------------------------------------------------------------------

    def put(self, items: Sequence[Item], deadline: float) -> int:
        end, stored = time.monotonic() + deadline, 0
        for item in items:
            if time.monotonic() > end:
                break
            parts = [] if self._has(item.key) else encode(item.key, item.about, item.payload)
            with self._writing:
                try:
                    stored += self._put(item.key, parts)
                except OSError as error:
                    raise StoreUnavailable(f"{self.folder}: {error.strerror or error}") from error
        with self._lock:
            self._dropped += len(items) - stored
        return stored

    def _has(self, key: bytes) -> bool:
        with self._lock:
            return key in self._places

    def _put(self, key: bytes, parts: list[Raw]) -> bool:
        """Whether the entry is stored now. Without `parts` it was before."""
        if not parts or self._has(key):
            return self._has(key)
        if not self._make_room(sum(memoryview(part).nbytes for part in parts)):
            return False
        self._append(key, parts)
        return True

    def _append(self, key: bytes, parts: list[Raw]) -> None:
        place = self._writable().append(key, parts)
        with self._lock:
            self._places[key] = place

    def _writable(self) -> Segment:
        """The segment that entries are appended to."""
        segment = self._open_segment
        if segment is None or segment.bytes >= self._segment_bytes:
            if segment is not None:
                segment.seal()
            self._newest += 1
            segment = self._open_segment = Segment(self.folder, self._newest, is_new=True)
            with self._lock:
                self._segments[segment.number] = segment
        return segment

    def _make_room(self, size: int) -> bool:
        """Whether so many bytes may be written, now that old segments have gone for them."""
        while self._bytes + size > self._capacity or _free_bytes(self.folder) - size < self._floor:
            oldest = next(iter(self._segments.values()), None)
            if oldest is None or oldest is self._open_segment:
                return False
            self._evict(oldest)
        return True

    def _evict(self, segment: Segment) -> None:
        kept: list[tuple[bytes, Place]] = []
        room = segment.bytes // 2
        with self._lock:
            del self._segments[segment.number]
            segment.borrow()
            segment.delete()
            for key, place in segment.places.items():
                if self._places.get(key) != place:
                    continue
                del self._places[key]
                if key in self._used and place.size <= room:
                    room -= place.size
                    kept.append((key, place))
                else:
                    self._evicted += 1
                self._used.discard(key)
        try:
            for key, place in kept:
                self._keep(key, bytes(segment.read(place, Buffer())))
        finally:
            with self._lock:
                segment.give_back()

    def _keep(self, key: bytes, raw: bytes) -> None:
        """An entry of a segment that goes, in the newest one."""
        try:
            decode(key, raw)
        except Damaged:
            self._damaged += 1
        else:
            self._append(key, [raw])

    def discard(self, keys: Collection[bytes]) -> None:
        """Segments are never changed: what else they have is written anew."""
        with self._writing:
            with self._lock:
                touched = {self._places[key].segment for key in keys if key in self._places}
                for key in keys:
                    self._places.pop(key, None)
            if self._open_segment is not None and self._open_segment.number in touched:
                self._open_segment = None
            for segment in [self._segments[number] for number in touched]:
                for key, place in segment.places.items():
                    if self._places.get(key) == place:
                        self._append(key, [segment.read(place, Buffer())])
                with self._lock:
                    del self._segments[segment.number]
                    segment.delete()

    @property
    def _bytes(self) -> int:
        return sum(segment.bytes for segment in self._segments.values())

    def clear(self, deadline: float) -> None:
        with self._writing, self._lock:
            for segment in self._segments.values():
                segment.delete()
            self._segments.clear()
            self._places.clear()
            self._used.clear()
            self._open_segment = None

    # -- the whole ------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        with self._lock:
            return StoreStats(
                len(self._places), self._bytes, self._capacity, self._damaged, self._dropped, self._evicted
            )

    def close(self) -> None:
        """Seal the open segment, so that the next start need not read it. A store that was not closed loses nothing."""
        with self._writing, self._lock:
            if self._open_segment is not None:
                with contextlib.suppress(OSError):
                    self._open_segment.seal()
            for segment in self._segments.values():
                segment.close()
            if self._lock_file is not None:
                os.close(self._lock_file)
                self._lock_file = None


def _locked(folder: Path) -> int:
    """A lock that ends with the process, however that ends. Raises StoreUnavailable, OSError."""
    file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise StoreUnavailable(f"{folder} is in use by another process: give each server a folder of its own") from None
    return file


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
