"""Maintaining a store without a server: listing, checking, pruning and copying it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from freehold.store.entry import HEADER_BYTES, Damaged, Header, decode, description, read_header
from freehold.store.store import Item, Store

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Finding:
    """An entry: its key, its size in bytes, its description, and its damage, if any."""

    key: bytes
    size: int
    about: str
    damage: str | None = None


def examine(store: Store) -> Iterator[Finding]:
    """Yield a finding for every entry, read whole. Raise StoreUnavailable."""
    for key in store.all_keys():
        if (raw := store.raw(key)) is None:
            continue
        try:
            decode(key, raw)
            yield Finding(key, len(raw), description(raw).decode(errors="replace"))
        except Damaged as damage:
            yield Finding(key, len(raw), "", str(damage))


def prune(store: Store) -> tuple[int, int]:
    """Discard entries that can never be served. Return how many, and their bytes."""
    damaged = [found for found in examine(store) if found.damage is not None]
    store.discard([found.key for found in damaged])
    return len(damaged), sum(found.size for found in damaged)


def export(store: Store, path: Path) -> int:
    """Write all whole entries to one file, one after another. Return how many."""
    count, partial = 0, path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        for key in store.all_keys():
            raw = store.raw(key)
            if raw is not None and _is_whole(key, raw):
                file.write(raw)
                count += 1
    partial.replace(path)
    return count


def _is_whole(key: bytes, raw: bytes) -> bool:
    try:
        decode(key, raw)
    except Damaged:
        return False
    return True


def import_from(store: Store, path: Path) -> tuple[int, int]:
    """Store the entries of a file that `export` wrote. Return how many are stored, and how many there are. Raise
    Damaged or StoreUnavailable."""
    stored = count = 0
    with path.open("rb") as file:
        while head := file.read(HEADER_BYTES):
            header = read_header(head)
            raw = head + _rest(file, header)
            stored += sum(store.put([Item(header.key, description(raw), decode(header.key, raw))], DEADLINE_S))
            count += 1
    return stored, count


def _rest(file: BinaryIO, header: Header) -> bytes:
    rest = file.read(header.size - HEADER_BYTES)
    if len(rest) < header.size - HEADER_BYTES:
        raise Damaged("the file is cut short")
    return rest
