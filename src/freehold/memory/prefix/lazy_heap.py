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
        self._heap: list[tuple[Any, int]] = []  # keys, and numbers of entries
        self._items: dict[int, Item] = {}  # by the number of their entry: those of stale entries are gone
        self._numbers: dict[Item, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, item: Item) -> bool:
        return item in self._numbers

    def __iter__(self) -> Iterator[Item]:
        return iter(self._numbers)

    def push(self, item: Item) -> None:
        """Add an item that has a key. Do nothing if it is in the heap."""
        if item not in self._numbers:
            self.lower(item)

    def lower(self, item: Item) -> None:
        """Add an item, or tell that its key may have become smaller."""
        key = self._key(item)
        if key is None:
            self.forget(item)
            return
        self._items.pop(self._numbers.get(item, 0), None)
        self._count += 1
        self._numbers[item] = self._count
        self._items[self._count] = item
        heapq.heappush(self._heap, (key, self._count))
        self._tidy()

    def forget(self, item: Item) -> None:
        """Take an item out, if it is there."""
        number = self._numbers.pop(item, None)
        if number is not None:
            del self._items[number]
            self._tidy()

    def _tidy(self) -> None:
        """Drop stale entries once they are the greater part."""
        if len(self._heap) > 2 * len(self._items) + STALE_MAX:
            self._heap = [entry for entry in self._heap if entry[1] in self._items]
            heapq.heapify(self._heap)

    def peek(self) -> Item | None:
        """Return the item with the smallest key, or None."""
        while self._heap:
            key, number = self._heap[0]
            item = self._items.get(number)
            if item is not None and self._key(item) == key:
                return item
            heapq.heappop(self._heap)
            if item is not None:
                self.lower(item)
        return None

    def pop(self) -> Item | None:
        """Take out the item with the smallest key."""
        item = self.peek()
        if item is not None:
            heapq.heappop(self._heap)
            del self._items[self._numbers.pop(item)]
        return item

    def checking(self) -> Iterator[None]:
        """Look for items without an entry in the heap, in slices. Nothing may change meanwhile. Raises AuditError."""
        found = 0
        for at, (_, number) in enumerate(self._heap):
            found += number in self._items
            if at % ENTRIES_AT_ONCE == ENTRIES_AT_ONCE - 1:
                yield
        if found != len(self._numbers):
            raise AuditError(f"a queue has {len(self._numbers)} items, {found} of them can come out of it")
