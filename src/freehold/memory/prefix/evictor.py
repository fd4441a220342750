"""Takes pages out of the prefix tree, from the leaves, and gives them back to their pools."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Protocol

import numpy as np

from freehold.arrays import Int32
from freehold.memory.ledger import owner
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.ledger.pool import FreedPages, PagePool
from freehold.memory.prefix.bounded import BoundedPages
from freehold.memory.prefix.eviction import FairEviction
from freehold.memory.prefix.history import PrefixHistory
from freehold.memory.prefix.node import Node
from freehold.memory.prefix.watcher import Rescuer

COLUMNS_AT_ONCE = 128  # of a slice


class Leaves(Protocol):
    """What eviction needs of the prefix tree. `remove_tail` takes the last pages of a leaf, all of it if need be, out
    of the tree."""

    pools: list[PagePool]
    epochs: Epochs
    tick: int
    history: PrefixHistory
    candidates: FairEviction
    bounded: list[BoundedPages]
    rescuer: Rescuer | None

    def remove_tail(self, node: Node, page_count: int) -> None: ...

    def nodes(self) -> Iterator[Node]: ...


class Evictor:
    """`evicted_page_count` page columns have left the tree so far."""

    def __init__(self, tree: Leaves):
        self._tree = tree
        self.evicted_page_count = 0

    def evict(self, page_count: int, cause: str) -> int:
        """Give up to `page_count` page columns back, by policy, from the leaves -> how many left the tree.
        Those that a step in flight may read go through limbo. `cause` is kept for who asks why they are gone."""
        evicted, given = 0, [FreedPages() for _ in self._tree.pools]
        while evicted < page_count:
            node = self._tree.candidates.pop()
            if node is None:
                break
            evicted += self._take(node, page_count - evicted, cause, given)
        self._give_back(evicted, given)
        return evicted

    def drop(self, node: Node, cause: str, used_until: int | None = None) -> int:
        """Evict a leaf, then ancestors left childless and unpinned; with `used_until`, a tick, only what was not used
        since -> how many page columns left the tree."""
        gone = 0
        while node.evictable and (used_until is None or node.last_used <= used_until):
            parent, given = node.parent, [FreedPages() for _ in self._tree.pools]
            gone += self._give_back(self._take(node, node.page_count, cause, given), given)
            assert parent is not None
            node = parent
        return gone

    def flushing(self) -> Generator[None, None, int]:
        """Evict all that is not held or used meanwhile, in slices, and have none of it copied -> how many page columns
        left the tree."""
        tree, gone, at_once = self._tree, 0, 0
        tick = tree.tick
        for node in tree.nodes():
            if node.evictable:
                rescuer, tree.rescuer = tree.rescuer, None
                at_once += self.drop(node, "a flush of the cache", tick)
                tree.rescuer = rescuer
            if at_once >= COLUMNS_AT_ONCE:
                gone, at_once = gone + at_once, 0
                yield
        return gone + at_once

    def _take(self, node: Node, page_count: int, cause: str, given: list[FreedPages]) -> int:
        have = node.page_count
        gone = min(have, page_count)
        bounded = {one.number: one for one in self._tree.bounded}
        for number, freed in enumerate(given):
            pages = self._rescue(node, number, gone)
            if number in bounded:
                left = int(np.count_nonzero(node.pages[number][have - gone :]))
                bounded[number].removed(left, pages, node, freed)
            else:
                freed.add(pages, owner.node(node.serial), node.fence)
        self._tree.history.evicted(node, gone, self._tree.epochs.submitted, self._tree.tick, cause)
        self._tree.remove_tail(node, gone)
        return gone

    def _rescue(self, node: Node, group: int, gone: int) -> Int32:
        """Offer the last `gone` columns of a node to whoever would keep them -> the pages that nobody does."""
        pages = node.pages[group][node.page_count - gone :]
        rescuer = self._tree.rescuer
        if rescuer is None:
            return pages
        first = node.page_count - gone
        taken = rescuer.take(node, group, first + pages.nonzero()[0])
        return np.delete(pages, taken - first)

    def _give_back(self, evicted: int, given: list[FreedPages]) -> int:
        for pool, pages in zip(self._tree.pools, given, strict=True):
            pages.give_back(pool)
        self.evicted_page_count += evicted
        return evicted
