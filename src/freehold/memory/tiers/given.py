"""What storage was given of one cache group, and what it is owed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from freehold.contract.arrays import Bool, Int32


class Given:
    """`stored` and `owed`, bool [host pages + 1]: entries that storage was given, and entries still to be given.
    Storage may have lost stored ones since."""

    def __init__(self, capacity: int):
        self.stored: Bool = np.zeros(capacity + 1, np.bool_)
        self.owed: Bool = np.zeros(capacity + 1, np.bool_)
        # Keys of pages that storage was given and the host lacks: the device has them, or is copying them to the host.
        self._above: set[bytes] = set()
        self._coming: set[bytes] = set()

    def owe(self, pages: Int32) -> None:
        """Owe storage the entries in `pages` [n], except stored ones. Page 0 stands for no entry."""
        self.owed[pages] = ~self.stored[pages]
        self.owed[0] = False

    def has(self, pages: Int32) -> None:
        """Note that storage was given the entries in `pages` [n]."""
        self.stored[pages] = True
        self.owed[pages] = False

    def lacks(self, keys: Sequence[bytes], pages: Int32) -> None:
        """Note that storage lost the pages of `keys`. Their entries are in `pages` [n], 0 if the host has none."""
        self.stored[pages] = False
        self._above.difference_update(keys)
        self.owe(pages)

    def forget(self) -> None:
        """Note that storage has nothing and is owed nothing."""
        self.stored[:] = self.owed[:] = False
        self._above.clear()
        self._coming.clear()

    def came(self, keys: Sequence[bytes], pages: Int32, are_stored: bool) -> None:
        """Note that entries came to `pages` [n]; `are_stored`: from storage."""
        self.stored[pages] = are_stored | self.of_device(keys)
        self._above.difference_update(keys)

    def went(self, keys: Sequence[bytes], pages: Int32, on_device: Bool) -> None:
        """Note that the entries in `pages` [n] are gone; `on_device` [n]: the device still has their pages."""
        kept = on_device & self.stored[pages]
        self._above.update(key for key, is_kept in zip(keys, kept, strict=True) if is_kept)
        self.stored[pages] = self.owed[pages] = False

    def coming(self, keys: Iterable[bytes]) -> None:
        """Note that the device evicts these pages and copies them to the host."""
        self._coming.update(self._above.intersection(keys))

    def arrived(self, keys: Iterable[bytes]) -> None:
        """Note that no copy of these pages is under way any more."""
        gone = self._coming.intersection(keys)
        self._coming -= gone
        self._above -= gone

    def device_cleared(self) -> None:
        """Note that the device has no page any more."""
        self._above &= self._coming

    def left_device(self, keys: Iterable[bytes]) -> None:
        """Note that the device no longer has pages with these keys."""
        self._above.difference_update(key for key in keys if key not in self._coming)

    def known(self, keys: Sequence[bytes], pages: Int32) -> Bool:
        """Return which pages storage was given, bool [n]. Their entries are in `pages` [n], 0 if the host has none."""
        return self.stored[pages] | self.of_device(keys)

    def of_device(self, keys: Sequence[bytes]) -> Bool:
        """Return which pages storage was given among those the host lacks, bool [n]."""
        return np.fromiter(map(self._above.__contains__, keys), np.bool_, len(keys))
