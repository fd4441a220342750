"""What every store offers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from freehold.store.entry import Raw


class StoreUnavailable(Exception):
    """The store can't be reached, is too slow, or can't be written. Nothing is known of what was asked."""


class Item(NamedTuple):
    """An entry to be stored. `about` describes it to people."""

    key: bytes
    about: bytes
    payload: Raw


@dataclass(frozen=True)
class StoreStats:
    """What a store holds, None where it can't say, and what became of entries since it was opened. `damaged`: entries
    that were not served because their bytes were wrong; `dropped`: those that there was no room for. `trouble`: why the
    store is left alone, if it is."""

    entries: int | None
    bytes: int | None
    capacity_bytes: int | None
    damaged: int = 0
    dropped: int = 0
    evicted: int = 0
    trouble: str | None = None


class Store(Protocol):
    """Entries by key. Called by IO threads, several at a time. An entry is there only when all of it is, and is served
    only as it was written: what is missing, damaged or foreign is None. Each call takes `deadline` seconds at most, as
    far as the device lets it, and raises StoreUnavailable."""

    def check(self, deadline: float) -> None:
        """Try whether it can serve with these settings. Raises ValueError if it never will, StoreUnavailable if it
        does not answer now."""
        ...

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Which of `keys` have an entry. To be asked for is to be used: a store that makes room keeps those longer."""
        ...

    def get(self, keys: Sequence[bytes], deadline: float) -> Iterable[memoryview | None]:
        """One for each key, in order: each is valid until the next is taken."""
        ...

    def put(self, items: Sequence[Item], deadline: float) -> list[bool]:
        """-> which are stored now, those that were before included. What is late counts as not stored; if all is, that
        raises StoreUnavailable."""
        ...

    def clear(self, deadline: float) -> None: ...

    def all_keys(self) -> Iterator[bytes]:
        """Those of all entries, in no order. For people: it may take long."""
        ...

    def foreign(self) -> Iterator[str]:
        """Names of what others keep among the entries. No call touches it. For people: it may take long."""
        ...

    def raw(self, key: bytes) -> bytes | None:
        """A whole entry (`entry.py`) as it is stored, damaged or not."""
        ...

    def discard(self, keys: Collection[bytes]) -> None:
        """Give these entries up for good."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None: ...
