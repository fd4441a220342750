"""What storage has been given of one cache group, and what it is owed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from freehold.arrays import Bool, Int32


class Given:
    """`stored` and `owed`, bool [host pages + 1]: entries that storage has been given, and entries that it is to be
    given. Storage may have lost the former since."""

    def __init__(self, capacity: int):
        self.stored: Bool = np.zeros(capacity + 1, np.bool_)
        self.owed: Bool = np.zeros(capacity + 1, np.bool_)
        # Keys of pages that storage was given and that the host has not: the device has them, or they come from there.
        self._above: set[bytes] = set()
        self._coming: set[bytes] = set()

    def owe(self, pages: Int32) -> None:
        """Storage is to be given the entries in `pages` [n] that it has not been given; page 0 is none."""
        self.owed[pages] = ~self.stored[pages]
        self.owed[0] = False

    def has(self, pages: Int32) -> None:
        """Storage has been given the entries in `pages` [n]."""
        self.stored[pages] = True
        self.owed[pages] = False

    def lacks(self, keys: Sequence[bytes], pages: Int32) -> None:
        """Storage has lost the entries of `keys`, in `pages` [n], 0 for those that the device alone has."""
        self.stored[pages] = False
        self._above.difference_update(keys)
        self.owe(pages)

    def forget(self) -> None:
        """Storage has none of this, and is owed nothing."""
        self.stored[:] = self.owed[:] = False
        self._above.clear()
        self._coming.clear()

    def came(self, keys: Sequence[bytes], pages: Int32, stored: Bool) -> None:
        """Entries have come to `pages` [n]; `stored` [n]: storage has them."""
        self.stored[pages] = stored | self.of_device(keys)
        self._above.difference_update(keys)

    def went(self, keys: Sequence[bytes], pages: Int32, on_device: Bool) -> None:
        """The entries in `pages` [n] have gone; `on_device` [n]: the device still has their pages."""
        kept = on_device & self.stored[pages]
        self._above.update(key for key, is_kept in zip(keys, kept, strict=True) if is_kept)
        self.stored[pages] = self.owed[pages] = False

    def coming(self, keys: Iterable[bytes]) -> None:
        """Pages that the device gives up come to the host."""
        self._coming.update(self._above.intersection(keys))

    def arrived(self, keys: Iterable[bytes]) -> None:
        """They have come, or never will."""
        gone = self._coming.intersection(keys)
        self._coming -= gone
        self._above -= gone

    def device_cleared(self) -> None:
        """The device has none of them any more."""
        self._above &= self._coming

    def left_device(self, keys: Iterable[bytes]) -> None:
        """The device has their pages no longer."""
        self._above.difference_update(key for key in keys if key not in self._coming)

    def of_device(self, keys: Sequence[bytes]) -> Bool:
        """Which of `keys`, of pages that the device has and the host lacks, storage was given, bool [n]."""
        return np.fromiter(map(self._above.__contains__, keys), np.bool_, len(keys))
