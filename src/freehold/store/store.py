"""The interface of every store."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from freehold.store.entry import Raw


class StoreUnavailable(Exception):
    """The store can't be reached, is too slow, or can't be written. The result of the call is unknown."""


class Item(NamedTuple):
    """An entry to be stored. `about` is a description for people."""

    key: bytes
    about: bytes
    payload: Raw


@dataclass(frozen=True)
class StoreStats:
    """The contents of a store, None where unknown, and counts since it was opened. `damaged`: entries not served
    because their bytes were wrong; `dropped`: entries without room. `trouble`: why the store is not being called, if
    so."""

    entries: int | None
    bytes: int | None
    capacity_bytes: int | None
    damaged: int = 0
    dropped: int = 0
    evicted: int = 0
    trouble: str | None = None


class Store(Protocol):
    """Entries by key. Called by IO threads, several at a time. An entry exists only once it is complete, and is served
    only as it was written: missing, damaged or foreign entries are None. Each call takes at most `deadline` seconds, as
    far as the device allows, and raises StoreUnavailable."""

    def check(self, deadline: float) -> None:
        """Test whether the store can serve with these settings. Raise ValueError if it never will, StoreUnavailable if
        it does not answer now."""
        ...

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Return which of `keys` have an entry. Asking counts as use: a store that evicts keeps those longer."""
        ...

    def get(self, keys: Sequence[bytes], deadline: float) -> Iterable[memoryview | None]:
        """Yield one payload for each key, in order: each is valid until the next is taken."""
        ...

    def put(self, items: Sequence[Item], deadline: float) -> list[bool]:
        """Return which items are stored now, including earlier ones. Late ones count as not stored. Raise
        StoreUnavailable if all are late."""
        ...

    def clear(self, deadline: float) -> None: ...

    def all_keys(self) -> Iterator[bytes]:
        """Yield the keys of all entries, in no order. For operators: it may take long."""
        ...

    def foreign(self) -> Iterator[str]:
        """Yield names of foreign objects among the entries. No call touches them. For operators: it may take long."""
        ...

    def raw(self, key: bytes) -> bytes | None:
        """Return a whole entry (`entry.py`) as stored, damaged or not."""
        ...

    def discard(self, keys: Collection[bytes]) -> None:
        """Delete these entries for good."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None: ...
