"""A segment: an append-only file of entries."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from freehold.contract.prefix_keys import KEY_BYTES
from freehold.store.entry import HEADER_BYTES, MAGIC, Damaged, Raw, read_header

_ROW = np.dtype([("key", f"V{KEY_BYTES}"), ("offset", "<u8"), ("size", "<u8")])
_NAME = re.compile(r"(\d{8}|[1-9]\d{8,})\.(kv|idx|tmp)")
# Links are not followed, and opening a pipe does not block.
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class NotASegment(Exception):
    """A file has the name of a segment but other content."""


class Place(NamedTuple):
    """Where an entry is: `size` bytes of a segment's file, from `offset`."""

    offset: int
    size: int


class Buffer:
    """Memory that is reused for reads: fresh memory costs more than the reading."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def of(self, size: int) -> memoryview:
        """Return the first `size` bytes, growing the buffer if needed."""
        if len(self._bytes) < size:
            self._bytes = bytearray(size)
        return memoryview(self._bytes)[:size]


class Segment:
    """One file, `<number>.kv`, open only while it is written to. When full it is sealed: an index beside it,
    `<number>.idx`, saves scanning it at start. `bytes` ends with the last whole entry. `keys` are those of its entries,
    in order; `is_used`, one byte each, says which were read or asked for since they were written."""

    def __init__(self, folder: Path, number: int):
        self.number = number
        self.path = folder / f"{number:08}.kv"
        self._index = folder / f"{number:08}.idx"
        self._file = -1
        self.bytes = 0
        self.keys: list[bytes] = []
        self.is_used = bytearray()
        self._offsets, self._sizes = array("Q"), array("Q")
        self.is_sealed = False

    @classmethod
    def created(cls, folder: Path, number: int) -> Segment:
        """Create a segment to write to. Raise OSError."""
        segment = cls(folder, number)
        segment._file = os.open(segment.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        return segment

    @classmethod
    def found(cls, folder: Path, number: int) -> Segment:
        """Open an existing segment. Raise OSError or NotASegment."""
        segment = cls(folder, number)
        with segment._opened() as file:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise NotASegment(segment.path.name)
            segment._load(file, status.st_size)
            if not segment.keys and not MAGIC.startswith(os.pread(file, len(MAGIC), 0)):
                raise NotASegment(segment.path.name)
        return segment

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the file for reading. Raise OSError."""
        file = os.open(self.path, os.O_RDONLY | _SAFELY)
        try:
            yield file
        finally:
            os.close(file)

    def is_gone(self) -> bool:
        """Return whether its file was deleted from outside. Raise OSError."""
        try:
            os.lstat(self.path)
        except FileNotFoundError:
            return True
        return False

    def place(self, entry: int) -> Place:
        """Return the place of an entry, by its number in `keys`."""
        return Place(self._offsets[entry], self._sizes[entry])

    def _add(self, key: bytes, offset: int, size: int) -> None:
        self.keys.append(key)
        self.is_used.append(False)
        self._offsets.append(offset)
        self._sizes.append(size)

    def _load(self, file: int, length: int) -> None:
        if self._load_index(length):
            self.bytes, self.is_sealed = length, True
            return
        for key, place in self._scan(file, length):
            self._add(key, *place)
            self.bytes = place.offset + place.size

    def _load_index(self, length: int) -> bool:
        """Load the index. Return whether it exists, is intact, and is of a file of this length."""
        try:
            with open(os.open(self._index, os.O_RDONLY | _SAFELY), "rb") as file:
                raw = file.read()
        except OSError:
            return False
        body = raw[16:]
        if len(body) < 8 or (len(body) - 8) % _ROW.itemsize or xxhash.xxh3_128(body).digest() != raw[:16]:
            return False
        if int.from_bytes(body[:8], "little") != length:
            return False
        rows = np.frombuffer(body, _ROW, offset=8)
        self.keys = [bytes(key) for key in rows["key"]]
        self.is_used = bytearray(len(rows))
        self._offsets, self._sizes = array("Q", rows["offset"].tobytes()), array("Q", rows["size"].tobytes())
        return True

    def _scan(self, file: int, length: int) -> Iterator[tuple[bytes, Place]]:
        """Yield the whole entries. After a damaged header, skip to the next one."""
        offset = 0
        while offset + HEADER_BYTES <= length:
            try:
                header = read_header(os.pread(file, HEADER_BYTES, offset))
            except Damaged:
                offset = _next_magic(file, offset + 1, length)
                continue
            if offset + header.size <= length:
                yield header.key, Place(offset, header.size)
            offset += header.size

    def append(self, keys: Sequence[bytes], sizes: Sequence[int], raw: Raw) -> int:
        """Append entries of `sizes` bytes, which lie one after another in `raw`. Return the number of the first. Raise
        OSError, having changed nothing."""
        first = len(self.keys)
        try:
            _write_all(self._file, raw, self.bytes)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.bytes)
            raise
        for key, size in zip(keys, sizes, strict=True):
            self._add(key, self.bytes, size)
            self.bytes += size
        return first

    def read(self, place: Place, buffer: Buffer) -> memoryview:
        """Read an entry into the buffer; fewer bytes if the file is shorter. Raise OSError."""
        whole = buffer.of(place.size)
        with self._opened() as file:
            return whole[: os.preadv(file, [whole], place.offset)]

    def seal(self) -> None:
        """Cut off a partial entry, write the index and close the file. If that fails, the next start scans the
        segment."""
        with contextlib.suppress(OSError):
            os.truncate(self.path, self.bytes)
            self._write_index()
            self.is_sealed = True
        self.close()

    def _write_index(self) -> None:
        rows = np.array(list(zip(self.keys, self._offsets, self._sizes, strict=True)), _ROW)
        body = self.bytes.to_bytes(8, "little") + rows.tobytes()
        partial = self._index.with_suffix(".tmp")
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _SAFELY, 0o600)
        try:
            _write_all(file, xxhash.xxh3_128(body).digest() + body, 0)
        finally:
            os.close(file)
        partial.replace(self._index)

    def delete(self) -> None:
        """Delete the file and its index. Raise OSError, leaving the file as before."""
        with contextlib.suppress(OSError):
            self._index.unlink()
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def numbers_in(folder: Path) -> tuple[list[int], int]:
    """Return the numbers of files named like segments, oldest first, and the highest number in any of our names. Raise
    OSError."""
    found = [match for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    segments = sorted(int(match[1]) for match in found if match[2] == "kv")
    return segments, max((int(match[1]) for match in found), default=0)


def strangers_in(folder: Path, segments: set[int]) -> Iterator[str]:
    """Yield names of files that neither are segments nor belong to one. Raise OSError."""
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        is_ours = match is not None and (match[2] != "kv" or int(match[1]) in segments)
        if not is_ours and path.name != "lock":
            yield path.name


def _next_magic(file: int, offset: int, length: int) -> int:
    """Return where the next header may begin, or the end."""
    with mmap.mmap(file, length, access=mmap.ACCESS_READ) as view:
        found = view.find(MAGIC, offset)
    return length if found < 0 else found


def _write_all(file: int, raw: Raw, offset: int) -> None:
    """Write all of `raw`: `pwrite` may write less than it is given."""
    rest = memoryview(raw)
    while rest:
        written = os.pwrite(file, rest, offset)
        offset, rest = offset + written, rest[written:]
