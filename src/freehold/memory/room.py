"""Room: how many pages of each group are available, and how to free more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from freehold.contract.arrays import Bool, Int64
from freehold.memory.hit import Hit
from freehold.memory.parts import RoomParts
from freehold.memory.prefix.evictor import without_rescue
from freehold.memory.prefix.node import Match, Node
from freehold.memory.tails import Tail
from freehold.memory.tiers.tiers import Tiers

AHEAD = 64  # evict an extra 1/64 of the pool

_Pages = Callable[[], Int64]  # counts pages of each group


class Room:
    """Counts of pages are int64 [groups]. Pages are free, or return (from limbo) when steps in flight complete. Room is
    made by evicting tails, then prefixes, and finally operators' pins."""

    def __init__(self, memory: RoomParts):
        self._pools = memory.pools
        self._groups = memory.groups
        self._page_size = memory.page_size
        self._tree = memory.tree
        self._tails = memory.tails
        self._pins = memory.pins
        self._leases = memory.leases
        self._tiers: Tiers | None = None

    def add_tiers(self, tiers: Tiers) -> None:
        """Count pages that return from evictions still being copied."""
        self._tiers = tiers

    @property
    def is_returning(self) -> bool:
        """Whether transfers in flight will free pages or make some evictable."""
        return self._tiers is not None and (self._tiers.hold_pages or bool(self._tiers.returning().any()))

    def _returning(self) -> Int64:
        return np.zeros(len(self._pools), np.int64) if self._tiers is None else self._tiers.returning()

    def _coming(self) -> Int64:
        """Return pages of each group that are free now, or once steps and transfers in flight complete."""
        coming = np.array([pool.free_count + pool.limbo_count for pool in self._pools], np.int64)
        return coming if self._tiers is None else coming + self._tiers.returning()

    def _at_hand(self) -> Int64:
        """Return the part of them that a new row can count on. Running rows take again in each step what they gave back
        of a bounded group in the last one, so some of it is always in limbo."""
        return (
            np.array(
                [
                    pool.free_count + (0 if group.is_bounded else pool.limbo_count)
                    for group, pool in zip(self._groups, self._pools, strict=True)
                ],
                np.int64,
            )
            + self._returning()
        )

    @property
    def reachable(self) -> Int64:
        """Pages of each group that are free, evictable, or returned when work in flight completes."""
        return self._coming() + self._tails.page_count + self._evictable()

    def _evictable(self) -> Int64:
        """Return pages of each group that evicting prefixes would free."""
        bounded = [one.evictable_count for one in self._tree.bounded]
        return self._by_group(self._tree.evictable_page_count, bounded)

    def _by_group(self, full: int, bounded: Sequence[int]) -> Int64:
        """Return one number for all full groups and one for each bounded group as int64 [groups]."""
        counts: Int64 = np.full(len(self._pools), full, np.int64)
        for one, count in zip(self._tree.bounded, bounded, strict=True):
            counts[one.number] = count
        return counts

    def taken_by(self, match: Match, released: Collection[Node] = ()) -> Int64:
        """Return pages of each group that are evictable now but not once the match is leased. `released` nodes count as
        unheld."""
        full = self._tree.holds.unheld_page_count(match, released)
        return self._by_group(full, [bounded.unread_count(match) for bounded in self._tree.bounded])

    def gained_by(self, rows: Int64) -> tuple[Int64, set[Node]]:
        """Return the pages of each group that would return if the leases in `rows` [n] ended, and the nodes that would
        become unheld."""
        leases = self._leases
        mine = leases.in_rows(rows)
        released = self._tree.holds.only_by([lease.node for lease in mine])
        columns = int(((leases.allocated[rows] - leases.shared[rows]) // self._page_size).sum())
        full = columns + sum(node.page_count for node in released)
        bounded = [
            one.gain_of([leases.row_pages(lease.row, one.number) for lease in mine]) for one in self._tree.bounded
        ]
        return self._by_group(full, bounded), released

    def make(self, rows: Int64, targets: Int64, decodes: Bool | None = None, may_unpin: bool = False) -> bool:
        """Make room for `extend(rows, targets, decodes)`: take back the excess of rejected drafts, drop tails, then
        evict; as a last resort, with `may_unpin`, drop operators' pins. Return whether the pages are free now; they may
        also be in limbo."""
        shortage = self._leases.lacking(rows, targets, decodes)
        if len(shortage.rows) == 0 or self._are_free(shortage.pages):
            return True
        self._leases.give_back_excess()
        # The excess given back may have been these rows' own.
        return self._give_up(self._leases.lacking(rows, targets, decodes).pages, self._coming, may_unpin)

    def make_for(self, needed: Sequence[int], may_unpin: bool = False, keep: Tail | None = None) -> bool:
        """Make room for `needed` pages of each group for a new row, keeping the tail `keep`."""
        if self._are_free(needed):
            return True
        self._leases.give_back_excess()
        return self._give_up(needed, self._at_hand, may_unpin, keep)

    def _are_free(self, needed: Sequence[int]) -> bool:
        return all(count <= pool.free_count for count, pool in zip(needed, self._pools, strict=True))

    def _give_up(self, needed: Sequence[int], have: _Pages, may_unpin: bool, keep: Tail | None = None) -> bool:
        """Drop tails, then prefixes, then those being copied to the host, then pins, until `have` counts `needed`
        pages. Return whether they are free now."""
        missing = _missing(needed, have)
        if missing.any():
            self._tails.give_up(int(missing.max()), keep)
            self._evict(needed, have)
        with without_rescue(self._tree):
            while self._tiers is not None and _missing(needed, have).any() and self._tiers.backup.give_up():
                self._evict(needed, have)
        if may_unpin and len(self._pins) and _missing(needed, have).any():
            self._pins.give_up()
            self._evict(needed, have)
        return self._are_free(needed)

    def can_be_made(self, needed: Sequence[int], hit: Hit, may_unpin: bool = False) -> bool:
        """Return whether a new row can have `needed` pages of each group without evicting the hit. Changes nothing."""
        match, tails = hit.match, self._tails.page_count - (hit.tail is not None)
        room = self._at_hand() + tails + self._evictable() - self.taken_by(match)
        if may_unpin:  # then only operators hold pages
            bounded = self._tree.bounded
            mine = self._by_group(match.length // self._page_size, [len(one.needed(match)) for one in bounded])
            cached = self._by_group(self._tree.page_count, [one.page_count for one in bounded])
            room = self._at_hand() + tails + cached - mine
        return bool((np.array(needed, np.int64) <= room).all())

    def _evict(self, needed: Sequence[int], have: _Pages) -> None:
        cause = f"a step that needed {max(needed)} pages"
        full = [number for number, group in enumerate(self._groups) if not group.is_bounded]
        if full and (most := int(_missing(needed, have)[full].max())):
            self._tree.evictor.evict(most + self._ahead(full[0]), cause)
        missing = _missing(needed, have)
        for bounded in self._tree.bounded:
            if count := int(missing[bounded.number]):
                bounded.evict(count + self._ahead(bounded.number))

    def _ahead(self, group: int) -> int:
        """Return how many extra pages to evict. Where evictions are copied first, this spares the next ones the
        wait."""
        copies = self._tiers is not None and self._tiers.backup.copies_evictions
        return self._pools[group].capacity // AHEAD if copies else 0


def _missing(needed: Sequence[int], have: _Pages) -> Int64:
    """Return pages of each group missing from `have`, int64 [groups]."""
    return np.maximum(np.array(needed, np.int64) - have(), 0)
