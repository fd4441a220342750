"""The host tier: pages of prefixes in host memory, found by their content."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from freehold.contract.arrays import Bool, Int32, Int64
from freehold.memory.events import EventLog
from freehold.memory.group import CacheGroup
from freehold.memory.ledger import owner
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.ledger.errors import LeaseError
from freehold.memory.ledger.pool import PagePool, Tier
from freehold.memory.prefix.history import PageAges
from freehold.memory.tiers.given import Given

ENTRIES_AT_ONCE = 128  # in a slice
CLEARED_AT_ONCE = 64


class HostPages:
    """The host pages of one cache group. An *entry* is a page under its key; a *mirror* is an entry that the device has
    too.

    Device and host form one cache: pages that the device evicts move to the host. So when room is short, mirrors are
    evicted first, the newest first, since the device keeps those longest; then the others, least recently used first;
    then mirrors owed to storage. An entry being read by a transfer stays.
    """

    def __init__(self, capacity: int, page_size: int, epochs: Epochs):
        self.pool = PagePool(capacity, page_size, epochs, Tier.HOST)
        self.evicted_count = 0
        self.ages = PageAges()
        self.events: EventLog | None = None
        self.given = Given(capacity)
        self.is_incomplete = False  # a device page may lack a copy without being queued for one
        self._mirrors: OrderedDict[bytes, int] = OrderedDict()
        self._alone: OrderedDict[bytes, int] = OrderedDict()
        self._on_device: set[bytes] = set()  # keys of pages that the device has
        self._keys = [b""] * (capacity + 1)  # of the entry of each page
        self._readers: Int32 = np.zeros(capacity + 1, np.int32)
        self._used_at: Int64 = np.zeros(capacity + 1, np.int64)
        self._epochs = epochs

    def __len__(self) -> int:
        return len(self._mirrors) + len(self._alone)

    def __contains__(self, key: bytes) -> bool:
        return key in self._mirrors or key in self._alone

    def is_mirror(self, key: bytes) -> bool:
        """Return whether the device has the page of an entry as well."""
        return key in self._mirrors

    def entries(self) -> Iterator[tuple[bytes, int]]:
        yield from self._mirrors.items()
        yield from self._alone.items()

    def pages_of_entries(self) -> Iterator[Int32]:
        """Yield the pages of all entries, int32 [n] per slice."""
        for first in range(1, self.pool.capacity + 1, ENTRIES_AT_ONCE):
            part = range(first, min(first + ENTRIES_AT_ONCE, self.pool.capacity + 1))
            yield np.array([page for page in part if self._page_of(self._keys[page]) == page], np.int32)

    def _page_of(self, key: bytes) -> int:
        """Return the page of an entry; 0 if there is none."""
        return self._mirrors.get(key) or self._alone.get(key, 0)

    def has(self, keys: Sequence[bytes]) -> Bool:
        """Return which of `keys` have an entry, bool [n]."""
        found: Bool = np.fromiter(map(self._mirrors.__contains__, keys), np.bool_, len(keys))
        return found | np.fromiter(map(self._alone.__contains__, keys), np.bool_, len(keys))

    @property
    def readers(self) -> Int32:
        """How many transfers read each page, int32 [pages + 1]."""
        return self._readers

    def pages_of(self, keys: Sequence[bytes]) -> Int32:
        """Return the pages of the entries of `keys`, int32 [n]; 0 for a key without an entry."""
        return np.fromiter(map(self._page_of, keys), np.int32, len(keys))

    def keys_of(self, pages: Int32) -> list[bytes]:
        """Return the keys of the entries in `pages` [n]."""
        return [self._keys[page] for page in pages.tolist()]

    @property
    def mirror_count(self) -> int:
        """Entries that the device has as well."""
        return len(self._mirrors)

    def add(self, keys: Sequence[bytes], pages: Int32, source: int, are_stored: bool = False) -> None:
        """Make entries of `pages` [n], owned by `source`; `are_stored`: storage has them. The first page of a prefix
        counts as used last, since the others are useless without it. Pages of keys that have an entry already are
        freed."""
        is_new = np.zeros(len(pages), np.bool_)
        for at in range(len(keys))[::-1]:
            if keys[at] not in self:
                is_new[at] = True
                queue = self._mirrors if keys[at] in self._on_device else self._alone
                page = queue[keys[at]] = int(pages[at])
                self._keys[page] = keys[at]
        new = [key for key, is_one in zip(keys, is_new, strict=True) if is_one]
        if self.events is not None:
            self.events.host_added(new)
        self.given.came(new, pages[is_new], are_stored)
        self._used_at[pages[is_new]] = self._epochs.submitted
        self.pool.move(pages[is_new], source, owner.ENTRY)
        self.pool.free(pages[~is_new], source, fence=0)

    def settle(
        self, keys: Sequence[bytes], pages: Int32, whole: Bool, source: int, are_stored: bool = False
    ) -> list[bytes]:
        """End a transfer to `pages` [n]: make entries of the `whole` [n] ones and free the others. Return the keys of
        the new entries."""
        arrived = [key for key, is_whole in zip(keys, whole, strict=True) if is_whole]
        self.pool.free(pages[~whole], source, fence=0)
        self.add(arrived, pages[whole], source, are_stored)
        self.arrived(keys)
        return arrived

    def arrived(self, keys: Sequence[bytes]) -> None:
        """Note that no transfer brings these keys any more."""
        self.given.arrived(keys)
        if self.events is not None:
            self.events.arrived(keys)

    def appeared(self, keys: Sequence[bytes]) -> None:
        """Note that the device has pages with these keys."""
        self._on_device.update(keys)
        for key in keys:
            if (page := self._alone.pop(key, None)) is not None:
                self._mirrors[key] = page

    def vanished(self, keys: Sequence[bytes]) -> None:
        """Note that the device no longer has these pages."""
        self._on_device.difference_update(keys)
        self.given.left_device(keys)
        for key in reversed(keys):
            if (page := self._mirrors.pop(key, None)) is not None:
                self._alone[key] = page

    def cleared(self) -> None:
        """Note that the device has none of the pages any more."""
        self.given.device_cleared()
        self._on_device.clear()
        self._alone.update(self._mirrors)
        self._mirrors.clear()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count entries of a prefix as used, the first of them last."""
        for key in reversed(keys):
            if key in self._alone:
                self._alone.move_to_end(key)

    def hold(self, keys: Sequence[bytes]) -> Int32:
        """Keep entries while a transfer reads them. Return their pages. This is no use of them, since storing reads,
        too. Raise KeyError."""
        pages = np.array([self._alone[key] if key in self._alone else self._mirrors[key] for key in keys], np.int32)
        self._readers[pages] += 1
        return pages

    def drop(self, pages: Int32) -> None:
        """End a `hold`. Raise LeaseError if a page has no reader."""
        if len(pages) and int(self._readers[pages].min()) < 1:
            raise LeaseError("a host page without a reader is dropped")
        self._readers[pages] -= 1

    def loaded(self, pages: Int32) -> None:
        """Count these pages, held by the caller, as loaded to the device."""
        self._count_ages(self.ages.hit, pages)
        self._used_at[pages] = self._epochs.submitted

    def _count_ages(self, counts: list[int], pages: Int32) -> None:
        for age in (self._epochs.submitted - self._used_at[pages]).tolist():
            counts[PageAges.bucket(age)] += 1

    def allocate(self, count: int, by: int) -> Int32:
        """Allocate at most `count` pages for `by`: free ones, then those of evicted entries."""
        if count > self.pool.free_count:
            self._evict(count - self.pool.free_count)
        return self.pool.allocate(np.full(min(count, self.pool.free_count), by, np.int64))

    def _evict(self, count: int) -> None:
        unread = ((key, page) for key, page in self._in_turn() if self._readers[page] == 0)
        going = [key for key, _ in itertools.islice(unread, count)]
        self.is_incomplete |= any(key in self._mirrors and not self.given.stored[self._mirrors[key]] for key in going)
        self._forget(going)

    def _in_turn(self) -> Iterator[tuple[bytes, int]]:
        """Yield entries in eviction order."""
        mirrors = self._mirrors.items()
        yield from ((key, page) for key, page in reversed(mirrors) if not self.given.owed[page])
        yield from self._alone.items()
        yield from ((key, page) for key, page in reversed(mirrors) if self.given.owed[page])

    def _forget(self, keys: Sequence[bytes]) -> None:
        if self.events is not None:
            self.events.host_removed(keys)
        gone = [(self._mirrors if key in self._mirrors else self._alone).pop(key) for key in keys]
        for page in gone:
            self._keys[page] = b""
        pages = np.array(gone, np.int32)
        self.given.went(keys, pages, np.fromiter(map(self._on_device.__contains__, keys), np.bool_, len(keys)))
        self.pool.free(pages, owner.ENTRY, fence=0)
        self.evicted_count += len(pages)
        self._count_ages(self.ages.evicted, pages)

    def clearing(self) -> Iterator[None]:
        """Forget, in slices, present entries that are not mirrors and that no transfer reads."""
        pages = self.pool.pages_of(owner.ENTRY)
        for first in range(0, len(pages), CLEARED_AT_ONCE):
            there = [key for key in self.keys_of(pages[first : first + CLEARED_AT_ONCE]) if key in self._alone]
            self._forget([key for key in there if self._readers[self._alone[key]] == 0])
            yield


class HostTier:
    """`pages[group]`: the host pages of each cache group."""

    def __init__(self, groups: Sequence[CacheGroup], page_counts: Sequence[int], page_size: int, epochs: Epochs):
        self.groups = groups
        self.page_size = page_size
        self.pages = [HostPages(count, page_size, epochs) for count in page_counts]
        self.leads_to_storage = False

    def free(self, pages: Sequence[Int32], source: int) -> None:
        """Free pages of each group owned by `source`."""
        for one, part in zip(self.pages, pages, strict=True):
            one.pool.free(part, source, fence=0)

    def clearing(self) -> Iterator[None]:
        """Forget, in slices, present entries that are not mirrors and that no transfer reads."""
        for pages in self.pages:
            yield from pages.clearing()
