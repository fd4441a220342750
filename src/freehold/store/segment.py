"""A segment: a file that entries are appended to, and never changed in."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from freehold.prefix_keys import KEY_BYTES
from freehold.store.entry import HEADER_BYTES, MAGIC, Damaged, Raw, read_header

_ROW = np.dtype([("key", f"V{KEY_BYTES}"), ("offset", "<u8"), ("size", "<u8")])


class Place(NamedTuple):
    """Where an entry is: `size` bytes of a segment, from `offset`."""

    segment: int
    offset: int
    size: int


class Buffer:
    """Memory that is read into again and again: fresh memory costs more than the reading."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def of(self, size: int) -> memoryview:
        """Its first `size` bytes: there are as many."""
        if len(self._bytes) < size:
            self._bytes = bytearray(size)
        return memoryview(self._bytes)[:size]


class Segment:
    """One file, `<number>.kv`. When it is full it is sealed: an index beside it, `<number>.idx`, saves reading it at
    start. `bytes` end with the last whole entry."""

    def __init__(self, folder: Path, number: int, is_new: bool = False, is_read_only: bool = False):
        self.number = number
        self.path = folder / f"{number:08}.kv"
        self._index = folder / f"{number:08}.idx"
        flags = os.O_RDONLY if is_read_only else os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_new else 0)
        self._file = os.open(self.path, flags | os.O_CLOEXEC, 0o600)
        self.bytes = 0
        self.places: dict[bytes, Place] = {}
        self._readers, self._is_deleted = 0, False
        self.is_sealed = False
        if not is_new:
            self._load()

    def _load(self) -> None:
        """Raises nothing: what can't be read is not there."""
        length = os.fstat(self._file).st_size
        if self._load_index(length):
            self.bytes, self.is_sealed = length, True
            return
        for key, place in self._scan(length):
            self.places[key] = place
            self.bytes = place.offset + place.size

    def _load_index(self, length: int) -> bool:
        """Whether there is an index of a file of this length, and every byte of it is right."""
        try:
            raw = self._index.read_bytes()
        except OSError:
            return False
        body = raw[16:]
        if len(body) < 8 or (len(body) - 8) % _ROW.itemsize or xxhash.xxh3_128(body).digest() != raw[:16]:
            return False
        if int.from_bytes(body[:8], "little") != length:
            return False
        rows = np.frombuffer(body, _ROW, offset=8)
        self.places = {
            bytes(key): Place(self.number, offset, size)
            for key, offset, size in zip(rows["key"], rows["offset"].tolist(), rows["size"].tolist(), strict=True)
        }
        return True

    def _scan(self, length: int) -> Iterator[tuple[bytes, Place]]:
        """The whole entries. Behind a damaged header, the next one is looked for."""
        offset = 0
        while offset + HEADER_BYTES <= length:
            try:
                header = read_header(os.pread(self._file, HEADER_BYTES, offset))
            except Damaged:
                offset = self._next_magic(offset + 1, length)
                continue
            if offset + header.size <= length:
                yield header.key, Place(self.number, offset, header.size)
            offset += header.size

    def _next_magic(self, offset: int, length: int) -> int:
        """Where a header may begin, or the end."""
        with mmap.mmap(self._file, length, access=mmap.ACCESS_READ) as view:
            found = view.find(MAGIC, offset)
        return length if found < 0 else found

    def append(self, key: bytes, parts: list[Raw]) -> Place:
        """Write an entry behind the others. Raises OSError; then the segment is as before."""
        size = sum(memoryview(part).nbytes for part in parts)
        try:
            _write_all(self._file, parts, self.bytes)
        except OSError:
            os.ftruncate(self._file, self.bytes)
            raise
        place = Place(self.number, self.bytes, size)
        self.bytes += size
        self.places[key] = place
        return place

    def borrow(self) -> None:
        """Somebody is about to read: the file stays open, even if it is deleted."""
        self._readers += 1

    def give_back(self) -> None:
        self._readers -= 1
        if self._is_deleted and self._readers == 0:
            self.close()

    def read(self, place: Place, buffer: Buffer) -> memoryview:
        """The bytes of an entry, fewer if the file is shorter: in the buffer. Raises OSError."""
        whole = buffer.of(place.size)
        return whole[: os.preadv(self._file, [whole], place.offset)]

    def seal(self) -> None:
        """Write the index. Raises OSError."""
        os.ftruncate(self._file, self.bytes)
        rows = np.array([(key, place.offset, place.size) for key, place in self.places.items()], _ROW)
        body = self.bytes.to_bytes(8, "little") + rows.tobytes()
        partial = self._index.with_suffix(".tmp")
        partial.write_bytes(xxhash.xxh3_128(body).digest() + body)
        partial.replace(self._index)
        self.is_sealed = True

    def delete(self) -> None:
        """The file and its index. Raises OSError."""
        self._is_deleted = True
        self._index.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
        if self._readers == 0:
            self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _write_all(file: int, parts: list[Raw], offset: int) -> None:
    """`pwritev` may write less than it is given."""
    views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
    while views:
        written = os.pwritev(file, views, offset)
        offset += written
        while views and written >= views[0].nbytes:
            written -= views.pop(0).nbytes
        if written:
            views[0] = views[0][written:]
