"""A heap whose items may change their keys while they are in it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

from freehold.memory.ledger.errors import AuditError

STALE_MAX = 64
ENTRIES_AT_ONCE = 2048  # of a slice

Item = TypeVar("Item", bound=Hashable)


class LazyHeap(Generic[Item]):
    """Items, each once, the one with the smallest key first. Every operation takes O(log n), amortised.

    `key` of an item may change at any time; None says that the item is out of the question. Entries are checked when
    they surface: an item whose key has grown goes back with its new key, one without a key is dropped. A key that has
    become smaller must be told (`lower`), and an item that is not wanted any more must be forgotten.
    """

    def __init__(self, key: Callable[[Item], Any | None]):
        self._key = key
        self._heap: list[tuple[Any, int, Item]] = []
        self._entries: dict[Item, int] = {}  # the number of each item's entry; others in the heap are stale
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[Item]:
        return iter(self._entries)

    def push(self, item: Item) -> None:
        """Add an item that has a key. Do nothing if it is in the heap."""
        if item not in self._entries:
            self.lower(item)

    def lower(self, item: Item) -> None:
        """Add an item, or tell that its key may have become smaller."""
        key = self._key(item)
        if key is None:
            self.forget(item)
            return
        self._number += 1
        self._entries[item] = self._number
        heapq.heappush(self._heap, (key, self._number, item))
        self._tidy()

    def forget(self, item: Item) -> None:
        """Take an item out, if it is there."""
        if self._entries.pop(item, None) is not None:
            self._tidy()

    def _tidy(self) -> None:
        """Drop stale entries once they are the greater part."""
        if len(self._heap) > 2 * len(self._entries) + STALE_MAX:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def peek(self) -> Item | None:
        """Return the item with the smallest key, or None."""
        while self._heap:
            entered, number, item = self._heap[0]
            is_current = self._entries.get(item) == number
            if is_current and self._key(item) == entered:
                return item
            heapq.heappop(self._heap)
            if is_current:
                self.lower(item)
        return None

    def pop(self) -> Item | None:
        """Take out the item with the smallest key."""
        item = self.peek()
        if item is not None:
            del self._entries[item]
            heapq.heappop(self._heap)
        return item

    def checking(self) -> Iterator[None]:
        """Look for items without an entry in the heap, in slices. Nothing may change meanwhile. Raises AuditError."""
        found = 0
        for at, (_, number, item) in enumerate(self._heap):
            found += self._entries.get(item) == number
            if at % ENTRIES_AT_ONCE == ENTRIES_AT_ONCE - 1:
                yield
        if found != len(self._entries):
            raise AuditError(f"a queue has {len(self._entries)} items, {found} of them can come out of it")
