"""Page ownership counted from the holders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from freehold.contract.arrays import Bool, Int32, Int64
from freehold.memory.ledger import owner
from freehold.memory.ledger.errors import AuditError
from freehold.memory.ledger.owner import OwnerKind
from freehold.memory.ledger.pool import PagePool

UNCLAIMED = -1
PAGES_AT_ONCE = 1 << 13  # in a slice

Holding = tuple[Int32, int]  # pages, 0 where there is none, and their owner


class Claims:
    """Holders report what they hold (`take`); then the ledger must agree (`finish`). `counts`: pages by kind of holder.

    Pages that move meanwhile are recorded by the pool and skipped. Every other page keeps its holder throughout, so it
    does not matter when each holder was asked.
    """

    def __init__(self, pool: PagePool, name: str):
        self.pool = pool
        self.counts: Counter[OwnerKind] = Counter()
        self._name = name
        self._claimed: Int64 = np.full(pool.capacity + 1, UNCLAIMED, np.int64)
        self._claimed[0] = owner.PADDING
        self._rank: Int32 = np.zeros(pool.capacity + 1, np.int32)
        self._moved = pool.watch()

    def take(self, holdings: Sequence[Holding]) -> None:
        """Record what holders hold. Raise AuditError for a page held twice."""
        pages = np.concatenate([part for part, _ in holdings])
        by = np.repeat(np.array([holder for _, holder in holdings], np.int64), [len(part) for part, _ in holdings])
        is_judged = (pages != 0) & ~self._moved[pages]
        pages, by = pages[is_judged], by[is_judged]
        order = np.arange(len(pages), dtype=np.int32)
        self._rank[pages] = order
        twice = (self._claimed[pages] != UNCLAIMED) | (self._rank[pages] != order)
        if twice.any():
            page = int(pages[int(twice.argmax())])
            holders = [*self._claimed[page : page + 1].tolist(), *by[pages == page].tolist()]
            first, second = [owner.describe(holder) for holder in holders if holder != UNCLAIMED][:2]
            raise AuditError(f"{self._name}: page {page} is held by both {first} and {second}")
        self._claimed[pages] = by
        for part, holder in holdings:
            self.counts[owner.kind_of(holder)] += int(np.count_nonzero(part))

    def finish(self) -> Iterator[None]:
        """Compare with the ledger, in slices. Raise AuditError unless it agrees."""
        pool = self.pool
        for first in range(0, pool.capacity + 1, PAGES_AT_ONCE):
            part = slice(first, first + PAGES_AT_ONCE)
            self._compare(first, (self._claimed[part] != pool.owner[part]) & ~self._moved[part])
            yield

    def close(self) -> None:
        """Stop recording moves."""
        self.pool.unwatch(self._moved)

    def _compare(self, first: int, differ: Bool) -> None:
        wrong = first + np.flatnonzero(differ)
        if len(wrong):
            page = int(wrong[0])
            claimed = int(self._claimed[page])
            found = "unclaimed" if claimed == UNCLAIMED else f"held by {owner.describe(claimed)}"
            history = "\n".join(f"  {move}" for move in self.pool.recorder.history(page))
            raise AuditError(
                f"{self._name}: {len(wrong)} pages differ; page {page} is registered to "
                f"{owner.describe(int(self.pool.owner[page]))} but {found}\n{history}"
            )


def in_slices(holdings: Iterator[Holding]) -> Iterator[list[Holding]]:
    """Cut holdings into lists of about PAGES_AT_ONCE pages."""
    part: list[Holding] = []
    count = 0
    for pages, holder in holdings:
        for first in range(0, len(pages), PAGES_AT_ONCE):
            piece = pages[first : first + PAGES_AT_ONCE]
            part.append((piece, holder))
            count += len(piece)
            if count >= PAGES_AT_ONCE:
                yield part
                part, count = [], 0
    if part:
        yield part
