"""The pool: all pages of one cache group on one tier, and the ledger of their owners."""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from freehold.contract.arrays import Bool, Int32, Int64
from freehold.memory.ledger import owner
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.ledger.errors import OutOfPages, OwnershipError
from freehold.memory.ledger.recorder import FlightRecorder


class Tier(StrEnum):
    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class FreedPages:
    """Pages of many owners returning to a pool: one move for all that wait for the same step."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[list[Int32], list[int]]] = {}

    def add(self, pages: Int32, source: int, fence: int) -> None:
        parts, owners = self._parts.setdefault(fence, ([], []))
        parts.append(pages)
        owners.append(source)

    def give_back(self, pool: PagePool) -> None:
        for fence, (parts, owners) in self._parts.items():
            pool.free(np.concatenate(parts), np.repeat(owners, [len(part) for part in parts]), fence)


class PagePool:
    """Pages 1 .. capacity, each with exactly one registered owner. Page 0 is padding, never owned.

    Every change of owner is one vectorised, checked move: all pages must be distinct and owned by `source`, or
    `OwnershipError` is raised and nothing changes. Free + limbo + held == capacity, always.

    Pages freed while a step in flight may touch them wait in limbo until the epoch passes.
    """

    def __init__(self, capacity: int, page_size: int, epochs: Epochs, tier: Tier = Tier.DEVICE):
        if capacity < 1 or page_size < 1:
            raise ValueError("a pool needs at least one page of at least one token")
        self.capacity = capacity
        self.page_size = page_size
        self.tier = tier
        self.epochs = epochs
        self.owner: Int64 = np.full(capacity + 1, owner.FREE, np.int64)
        self.owner[0] = owner.PADDING
        self.since: Int64 = np.zeros(capacity + 1, np.int64)
        self.recorder = FlightRecorder(capacity, max(1 << 16, capacity))
        # A stack: the page freed last is reused first, while its memory may still be in a cache.
        self._free: Int32 = np.arange(capacity, 0, -1, dtype=np.int32)
        self.free_count = capacity
        self._limbo: dict[int, list[Int32]] = {}
        self.limbo_count = 0
        self._rank: Int32 = np.zeros(capacity + 1, np.int32)
        self._watches: list[Bool] = []

    @property
    def held_count(self) -> int:
        """Pages owned by a lease, a tree node or a transfer."""
        return self.capacity - self.free_count - self.limbo_count

    def allocate(self, owners: Int64) -> Int32:
        """Allocate one free page for each entry of `owners` [n]. Return the pages, int32 [n].

        Raise OutOfPages, having changed nothing, if fewer than n pages are free.
        """
        count = len(owners)
        if count > self.free_count:
            raise OutOfPages(f"{count} pages asked for, {self.free_count} of {self.capacity} free")
        # A copy, reversed: the stack's top comes first, and later frees overwrite the stack.
        pages = self._free[self.free_count - count : self.free_count][::-1].copy()
        self.move(pages, owner.FREE, owners)
        self.free_count -= count
        return pages

    def move(self, pages: Int32, source: int | Int64, target: int | Int64) -> None:
        """Hand `pages` from `source` to `target` (scalars, or one owner per page).

        Raise OwnershipError, having changed nothing, unless every page is owned by its source and no page is named
        twice.
        """
        self.epochs.check_thread()
        if len(pages) == 0:
            return
        wrong = self.owner[pages] != source
        if wrong.any():
            at = int(np.argmax(wrong))
            page, by = int(pages[at]), owner.describe(int(self.owner[pages[at]]))
            expected, to = (owner.describe(one if isinstance(one, int) else int(one[at])) for one in (source, target))
            raise OwnershipError(
                f"page {page}: expected owner {expected}, found {by}, on its way to {to}\n{self._history(page)}"
            )
        order = np.arange(len(pages), dtype=np.int32)
        self._rank[pages] = order
        repeated = self._rank[pages] != order
        if repeated.any():
            page = int(pages[int(np.argmax(repeated))])
            raise OwnershipError(f"page {page} is named twice in one move\n{self._history(page)}")
        self.owner[pages] = target
        self.since[pages] = self.epochs.submitted
        for moved in self._watches:
            moved[pages] = True
        self.recorder.record(self.epochs.submitted, pages, source, target)

    def free(self, pages: Int32, source: int | Int64, fence: int) -> None:
        """Give `pages` back. They are free at once if step `fence`, the last that may touch them, is complete;
        otherwise they stay in limbo until it is."""
        if len(pages) == 0:
            return
        if self.epochs.passed(fence):
            self.move(pages, source, owner.FREE)
            self._push_free(pages)
        else:
            self.move(pages, source, owner.limbo(fence))
            self._limbo.setdefault(fence, []).append(pages.copy())
            self.limbo_count += len(pages)

    def collect(self) -> int:
        """Free the limbo pages whose fence has passed. Return how many."""
        ready = [fence for fence in self._limbo if self.epochs.passed(fence)]
        freed = 0
        for fence in ready:
            for pages in self._limbo.pop(fence):
                self.move(pages, owner.limbo(fence), owner.FREE)
                self._push_free(pages)
                freed += len(pages)
        self.limbo_count -= freed
        return freed

    def _push_free(self, pages: Int32) -> None:
        self._free[self.free_count : self.free_count + len(pages)] = pages
        self.free_count += len(pages)

    def watch(self) -> Bool:
        """Start recording which pages change owners. Return the record, bool [pages + 1]."""
        moved: Bool = np.zeros(self.capacity + 1, np.bool_)
        self._watches.append(moved)
        return moved

    def unwatch(self, moved: Bool) -> None:
        """End a `watch`."""
        self._watches = [one for one in self._watches if one is not moved]

    def free_pages(self) -> Int32:
        """Return the free list itself, for the audit."""
        return self._free[: self.free_count]

    def pages_of(self, by: int) -> Int32:
        """Return all pages that `by` owns, int32 [n]."""
        return np.flatnonzero(self.owner == by).astype(np.int32)

    def limbo_pages(self) -> dict[int, Int32]:
        """Return limbo pages by fence, for the audit."""
        return {fence: np.concatenate(parts) for fence, parts in self._limbo.items()}

    def _history(self, page: int) -> str:
        return "\n".join(f"  {move}" for move in self.recorder.history(page)) or "  no recorded move"
