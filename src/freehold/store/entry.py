"""The format of a stored entry: header, description, payload. It is served only if every byte is right.

    magic 4 | version 2 | length of description 2 | length of payload 8 | key 32 | checksum of what follows 16 |
    checksum of the header 8 | description | payload

Numbers are little-endian. Checksums (XXH3) detect damage; they don't protect against writers to the store.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from freehold.contract.prefix_keys import KEY_BYTES

MAGIC = b"FHKV"
VERSION = 1
_FIELDS = struct.Struct(f"<4sHHQ{KEY_BYTES}s16s")
HEADER_BYTES = _FIELDS.size + 8

Raw = bytes | bytearray | memoryview


class Damaged(ValueError):
    """Bytes that differ from what was written, or were written by another program."""


@dataclass(frozen=True)
class Header:
    """The header of an entry. `size` is that of the whole entry, in bytes."""

    key: bytes
    about_bytes: int
    payload_bytes: int
    checksum: bytes

    @property
    def size(self) -> int:
        return HEADER_BYTES + self.about_bytes + self.payload_bytes


def encode(key: bytes, about: bytes, payload: Raw) -> list[Raw]:
    """Return the parts of an entry, in order. `about` describes it to people (at most 65,535 bytes)."""
    body = xxhash.xxh3_128(about)
    body.update(payload)
    fields = _FIELDS.pack(MAGIC, VERSION, len(about), memoryview(payload).nbytes, key, body.digest())
    return [fields + xxhash.xxh3_64(fields).digest(), about, payload]


def read_header(raw: Raw) -> Header:
    """Parse a header. Raise Damaged."""
    if len(raw) < HEADER_BYTES:
        raise Damaged("the header is cut short")
    fields = bytes(raw[: _FIELDS.size])
    if xxhash.xxh3_64(fields).digest() != bytes(raw[_FIELDS.size : HEADER_BYTES]):
        raise Damaged("the header's checksum is wrong")
    magic, version, about, payload, key, checksum = _FIELDS.unpack(fields)
    if magic != MAGIC or version != VERSION:
        raise Damaged(f"not an entry of version {VERSION}")
    return Header(key, about, payload, checksum)


def decode(key: bytes, raw: Raw) -> memoryview:
    """Return the payload of a whole entry, checked against its key. Raise Damaged."""
    header, view = read_header(raw), memoryview(raw)
    if header.key != key:
        raise Damaged("it is the entry of another key")
    if view.nbytes != header.size:
        raise Damaged(f"{view.nbytes} bytes, not {header.size}")
    if xxhash.xxh3_128(view[HEADER_BYTES:]).digest() != header.checksum:
        raise Damaged("the checksum is wrong")
    return view[HEADER_BYTES + header.about_bytes :]


def description(raw: Raw) -> bytes:
    """Return the description in a whole entry. Raise Damaged."""
    header = read_header(raw)
    return bytes(memoryview(raw)[HEADER_BYTES : HEADER_BYTES + header.about_bytes])
