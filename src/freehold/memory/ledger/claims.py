"""Who holds which page of a pool, counted from the holders."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freehold.arrays import Int32, Int64
from freehold.memory.ledger import owner
from freehold.memory.ledger.errors import AuditError
from freehold.memory.ledger.pool import PagePool

NOBODY = -1


class Claims:
    """Holders say what they hold (`take`); then the ledger must say the same (`finish`). With `has_holes` their pages
    may be 0, which is nobody's."""

    def __init__(self, pool: PagePool, name: str, has_holes: bool = False):
        self.pool = pool
        self._name = name
        self._has_holes = has_holes
        self._counted: Int64 = np.full(pool.capacity + 1, NOBODY, np.int64)
        if has_holes:
            self._counted[0] = owner.PADDING

    def take(self, parts: Sequence[Int32], owners: Sequence[int]) -> None:
        """The pages in parts[i] are held by owners[i]. Raises AuditError for a page that is held twice."""
        if not parts:
            return
        pages = np.concatenate(parts)
        by = np.repeat(np.array(owners, np.int64), [len(part) for part in parts])
        if self._has_holes:
            by, pages = by[pages != 0], pages[pages != 0]
        values, counts = np.unique(pages, return_counts=True)
        twice = values[(counts > 1) | (self._counted[values] != NOBODY)]
        if len(twice):
            page = int(twice[0])
            holders = [*self._counted[page : page + 1].tolist(), *by[pages == page].tolist()]
            first, second = [owner.describe(holder) for holder in holders if holder != NOBODY][:2]
            raise AuditError(f"{self._name}: page {page} is held by both {first} and {second}")
        self._counted[pages] = by

    def finish(self) -> None:
        """Raises AuditError unless the ledger says the same."""
        pool = self.pool
        wrong = np.flatnonzero(self._counted != pool.owner)
        if len(wrong):
            page = int(wrong[0])
            found = "nobody" if self._counted[page] == NOBODY else owner.describe(int(self._counted[page]))
            history = "\n".join(f"  {move}" for move in pool.recorder.history(page))
            raise AuditError(
                f"{self._name}: {len(wrong)} pages differ; page {page} is registered to "
                f"{owner.describe(int(pool.owner[page]))} but held by {found}\n{history}"
            )
        if pool.free_count + pool.limbo_count + pool.held_count != pool.capacity:
            raise AuditError(f"{self._name}: free + limbo + held is not {pool.capacity}")
