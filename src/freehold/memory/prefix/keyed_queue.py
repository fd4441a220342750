"""A queue of items by keys that change while they wait."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedList  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

from freehold.memory.ledger.errors import AuditError

ENTRIES_AT_ONCE = 2048  # in a slice

Item = TypeVar("Item", bound=Hashable)


class KeyedQueue(Generic[Item]):
    """Unique items, smallest key first; among equal keys the one put first. Items that move or leave leave nothing
    behind, so every operation takes microseconds.

    The `key` of an item may change: then `put` it again. An item whose key has grown unnoticed is moved back when met
    at the head; one whose key is None is dropped.
    """

    def __init__(self, key: Callable[[Item], Any | None]):
        self._key = key
        self._sorted: Any = SortedList()  # pairs of key and entry number
        self._items: dict[int, Item] = {}  # by entry number
        self._entries: dict[Item, tuple[Any, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def put(self, item: Item) -> None:
        """Add an item, or move it to its current key. Remove it if it has no key."""
        key, known = self._key(item), self._entries.get(item)
        if known is not None and known[0] == key:
            return
        self.forget(item)
        if key is not None:
            self._count += 1
            entry = self._entries[item] = key, self._count
            self._items[self._count] = item
            self._sorted.add(entry)

    def forget(self, item: Item) -> None:
        """Remove an item, if present."""
        entry = self._entries.pop(item, None)
        if entry is not None:
            self._sorted.remove(entry)
            del self._items[entry[1]]

    def peek(self) -> Item | None:
        """Return the item with the smallest key, or None."""
        while self._sorted:
            key, number = self._sorted[0]
            item = self._items[number]
            if self._key(item) == key:
                return item
            self.put(item)
        return None

    def due(self, limit: Any) -> Item | None:
        """Return the item with the smallest key, or None if that key exceeds `limit`."""
        item = self.peek()
        return item if item is not None and self._entries[item][0] <= limit else None

    def pop(self) -> Item | None:
        """Remove and return the item with the smallest key, or None."""
        item = self.peek()
        if item is not None:
            self.forget(item)
        return item

    def checking(self) -> Iterator[None]:
        """Check, in slices, that every item can come out. Nothing may change meanwhile. Raise AuditError."""
        found = 0
        for at, entry in enumerate(self._sorted):
            found += entry[1] in self._items and self._entries.get(self._items[entry[1]]) == entry
            if at % ENTRIES_AT_ONCE == ENTRIES_AT_ONCE - 1:
                yield
        if not found == len(self._sorted) == len(self._entries):
            raise AuditError(f"a queue has {len(self._entries)} items, {found} of them can come out of it")
