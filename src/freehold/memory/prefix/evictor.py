"""Evicts pages from the leaves of the prefix tree and returns them to their pools."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from freehold.contract.arrays import Int32
from freehold.contract.slices import finished
from freehold.memory.ledger import owner
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.ledger.pool import FreedPages, PagePool
from freehold.memory.prefix.bounded import BoundedPages
from freehold.memory.prefix.eviction import FairEviction
from freehold.memory.prefix.history import PrefixHistory
from freehold.memory.prefix.node import Node
from freehold.memory.prefix.watcher import Rescuer

COLUMNS_AT_ONCE = 512  # in a slice
COLUMNS_OF_A_NODE = 32  # cost per node, in columns


class Leaves(Protocol):
    """The part of the prefix tree that eviction needs. `remove_tail` removes the last pages of a leaf, or all of it,
    from the tree."""

    pools: list[PagePool]
    epochs: Epochs
    tick: int
    history: PrefixHistory
    candidates: FairEviction
    bounded: list[BoundedPages]
    rescuer: Rescuer | None

    def remove_tail(self, node: Node, page_count: int) -> None: ...

    def nodes(self) -> Iterator[Node]: ...


@contextmanager
def without_rescue(tree: Leaves) -> Generator[None]:
    """Disable copying of evicted pages within the block."""
    rescuer, tree.rescuer = tree.rescuer, None
    try:
        yield
    finally:
        tree.rescuer = rescuer


class Evictor:
    """`evicted_page_count` counts page columns evicted so far."""

    def __init__(self, tree: Leaves):
        self._tree = tree
        self.evicted_page_count = 0

    def evict(self, page_count: int, cause: str) -> int:
        """Evict up to `page_count` page columns, by policy, from the leaves. Return how many left the tree. Pages that
        a step in flight may read go through limbo. `cause` is recorded for explanations."""
        evicted, given = 0, [FreedPages() for _ in self._tree.pools]
        while evicted < page_count:
            node = self._tree.candidates.peek()
            if node is None:
                break
            evicted += self._take(node, page_count - evicted, cause, given)
        self._give_back(evicted, given)
        return evicted

    def drop(self, node: Node, cause: str) -> int:
        """Evict a leaf, then ancestors left childless and unpinned. Return how many page columns left the tree."""
        return finished(self._dropping(iter([node]), cause, lambda node: True))

    def flushing(self) -> Generator[None, None, int]:
        """Evict all that is not held or used meanwhile, in slices, without copying. Return how many page columns left
        the tree."""
        tick = self._tree.tick
        return self._dropping(self._tree.nodes(), "a flush of the cache", lambda node: node.last_used <= tick)

    def forgetting(self, weights: int) -> Generator[None, None, int]:
        """Evict all KV of weights before `weights`, likewise."""
        return self._dropping(self._tree.nodes(), "new weights", lambda node: node.namespace.weights < weights)

    def _dropping(
        self, nodes: Iterator[Node], cause: str, may_go: Callable[[Node], bool]
    ) -> Generator[None, None, int]:
        """Evict those of `nodes` that are leaves and may go, then ancestors left childless that may, in slices. Return
        how many page columns left the tree."""
        gone, work = 0, 0
        for leaf in nodes:
            node: Node | None = leaf
            while node is not None and node.evictable and may_go(node):
                parent, given = node.parent, [FreedPages() for _ in self._tree.pools]
                with without_rescue(self._tree):
                    gone_now = self._take(node, min(node.page_count, COLUMNS_AT_ONCE), cause, given)
                gone += self._give_back(gone_now, given)
                work += gone_now + COLUMNS_OF_A_NODE
                if work >= COLUMNS_AT_ONCE:
                    work = 0
                    yield
                node = node if node.parent is not None else parent
        return gone

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
        """Offer the last `gone` columns of a node to the rescuer. Return the pages it did not take."""
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
