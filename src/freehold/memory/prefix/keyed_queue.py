"""A queue of items by keys that change while they wait."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedList  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

from freehold.memory.ledger.errors import AuditError

ENTRIES_AT_ONCE = 2048  # of a slice

Item = TypeVar("Item", bound=Hashable)


class KeyedQueue(Generic[Item]):
    """Items, each once, the one with the smallest key first; among equals the one that was put there first. Nothing is
    left behind by items that move or leave, so no operation takes much longer than another: microseconds.

    `key` of an item may change: then it is to be `put` again. One whose key has grown in silence goes back when it is
    met; one that has no key any more (None) is dropped.
    """

    def __init__(self, key: Callable[[Item], Any | None]):
        self._key = key
        self._sorted: Any = SortedList()  # keys, and the number of an entry
        self._items: dict[int, Item] = {}  # by the number of their entry
        self._entries: dict[Item, tuple[Any, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def put(self, item: Item) -> None:
        """Add an item, or move it to where its key is now. Without a key it leaves."""
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
        """Take an item out, if it is there."""
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
        """Return the item with the smallest key, or None if that is more than `limit`."""
        item = self.peek()
        return item if item is not None and self._entries[item][0] <= limit else None

    def pop(self) -> Item | None:
        """Take out the item with the smallest key."""
        item = self.peek()
        if item is not None:
            self.forget(item)
        return item

    def checking(self) -> Iterator[None]:
        """Look for items that will not come out, in slices. Nothing may change meanwhile. Raises AuditError."""
        found = 0
        for at, entry in enumerate(self._sorted):
            found += entry[1] in self._items and self._entries.get(self._items[entry[1]]) == entry
            if at % ENTRIES_AT_ONCE == ENTRIES_AT_ONCE - 1:
                yield
        if not found == len(self._sorted) == len(self._entries):
            raise AuditError(f"a queue has {len(self._entries)} items, {found} of them can come out of it")
