"""The tree's pages of a bounded group: which of them somebody reads, and which go first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import numpy as np

from freehold.arrays import Bool, Int32, Int64
from freehold.memory.group import CacheGroup
from freehold.memory.ledger import owner
from freehold.memory.ledger.errors import LeaseError
from freehold.memory.ledger.pool import FreedPages, PagePool
from freehold.memory.prefix.node import Match, Node
from freehold.memory.prefix.retention import DONE
from freehold.memory.prefix.watcher import Rescuer, Watcher

NEWEST = np.iinfo(np.int64).max  # later than any step


class Prefixes(Protocol):
    """What bounded pages need of the prefix tree."""

    version: int
    page_size: int
    watchers: list[Watcher]
    rescuer: Rescuer | None

    def path(self, node: Node) -> list[Node]: ...

    def reconsider(self, node: Node) -> None: ...

    def trim(self, node: Node) -> None: ...


class BoundedPages:
    """Pages of a bounded group are borrowed one by one. A pin on a path would hold every old window on it, and a small
    pool could be wedged by long prefixes; so a pin protects pages of full groups, and of bounded ones what is borrowed.

    A page that nobody borrows may leave a node whatever holds that node: a hole (0) stays in its column. First go the
    pages that the end of no node looks back on, least recently used first; then the others, those last that a hint
    retains. What a step in flight may still read goes only if nothing else does: it would not be free at once, and a
    row that reads on would wait in each step for what it has just given back.
    """

    def __init__(self, tree: Prefixes, number: int, group: CacheGroup, pool: PagePool):
        self._tree = tree
        self.number = number
        self.group = group
        self.pool = pool
        self.page_count = 0  # in the tree
        self.borrowed_count = 0  # of them, those that somebody reads
        self.readers: Int32 = np.zeros(pool.capacity + 1, np.int32)
        self._read_until: Int64 = np.zeros(pool.capacity + 1, np.int64)  # the last step that may read a page
        # Nodes with pages, least recently used first. What is in neither has none; what is in one may have none.
        self._inner: OrderedDict[int, Node] = OrderedDict()
        self._ends: OrderedDict[int, Node] = OrderedDict()

    @property
    def evictable_count(self) -> int:
        return self.page_count - self.borrowed_count

    # -- borrowing ------------------------------------------------------------------------------------

    def borrow(self, pages: Int32) -> None:
        """One more reader for each of `pages` [n], which are distinct pages of the tree or 0."""
        pages = pages[pages != 0]
        before = self.readers[pages]
        self.borrowed_count += len(before) - int(np.count_nonzero(before))
        self.readers[pages] = before + 1

    def give_back(self, pages: Int32, fences: int | Int64) -> None:
        """One reader less for each of `pages` [n], which may be 0. Steps up to `fences` may still read them. If all
        have one fence, they are one reader's, and distinct; else they may name a page several times. Raises
        LeaseError if nobody reads one."""
        there = pages != 0
        pages = pages[there]
        if isinstance(fences, int):
            left = self.readers[pages] - 1
            self.readers[pages] = left
            self._read_until[pages] = np.maximum(self._read_until[pages], fences)
            self.borrowed_count -= len(left) - int(np.count_nonzero(left))
        else:
            np.subtract.at(self.readers, pages, 1)
            left = self.readers[pages]
            np.maximum.at(self._read_until, pages, fences[there])
            self.borrowed_count -= len(np.unique(pages[left == 0]))
        if len(left) and left.min() < 0:
            raise LeaseError(f"group {self.group.name}: page {int(pages[int(left.argmin())])} has no reader")

    def needed(self, match: Match) -> Int32:
        """The pages that a sequence needs to go on from a match."""
        return np.empty(0, np.int32) if match.node is None else self.needed_at(match.node, match.length)

    def needed_at(self, node: Node, end: int) -> Int32:
        """The same for the prefix of `end` tokens, which ends in `node`."""
        size = self._tree.page_size
        first = self.group.first_column(end, size)
        parts: list[Int32] = []
        while node.parent is not None and node.end > first * size:
            begin = node.start // size
            parts.append(node.pages[self.number][max(first - begin, 0) : max(end // size - begin, 0)])
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)

    def unread_count(self, match: Match) -> int:
        """Pages that a match needs and nobody reads yet."""
        return int(np.count_nonzero(self.readers[self.needed(match)] == 0))

    def gain_of(self, rows: list[Int32]) -> int:
        """Pages that nobody would read any more if these rows of page tables ended: their own, and those of the tree
        that only they borrow."""
        pages, counts = np.unique(np.concatenate(rows), return_counts=True)
        return int(np.count_nonzero((pages != 0) & (counts >= self.readers[pages])))

    # -- coming and going -----------------------------------------------------------------------------

    def added(self, node: Node, count: int) -> None:
        """`count` pages came to a node: owned by it, not borrowed yet."""
        self.page_count += count
        self.touch(node)

    def touch(self, node: Node) -> None:
        """A node was used, or has pages."""
        for queue in (self._inner, self._ends):
            queue[node.serial] = node
            queue.move_to_end(node.serial)

    def removed(self, count: int, pages: Int32, node: Node, freed: FreedPages) -> None:
        """`count` pages of a leaf's end leave the tree with it; of them `pages` [n], or 0, are nobody's then."""
        self.page_count -= count
        pages = pages[pages != 0]
        if len(pages):
            freed.add(pages, owner.node(node.serial), int(self._read_until[pages].max()))

    def forget(self, node: Node) -> None:
        """A node has left the tree."""
        self._inner.pop(node.serial, None)
        self._ends.pop(node.serial, None)

    def evict(self, count: int) -> int:
        """Give `count` pages back that nobody reads, or what there is -> how many. Holes stay in their columns. Of a
        window that a node's end looks back on, nothing is kept if a part of it goes."""
        evicted, freed, completed = 0, FreedPages(), self.pool.epochs.completed
        for read_until, level in ((completed, 0), (NEWEST, 0), (NEWEST, None)):
            for queue in (self._inner, self._ends):
                for node, columns in self._victims(queue, level, read_until, count - evicted):
                    self._take(node, columns, freed)
                    evicted += len(columns)
        freed.give_back(self.pool)
        self.page_count -= evicted
        return evicted

    def _victims(
        self, queue: OrderedDict[int, Node], level: int | None, read_until: int, count: int
    ) -> list[tuple[Node, Int64]]:
        """Nodes, of at most a `level` if what their ends look back on goes, and the columns that they give: `count` of
        them if there are as many. No step after `read_until` reads those."""
        are_inner = queue is self._inner
        chosen: list[tuple[Node, Int64]] = []
        stale: list[int] = []
        for serial, node in queue.items():
            if count <= 0:
                break
            present = self._present(node, are_inner)
            if not present.any():
                stale.append(serial)
                continue
            pages = node.pages[self.number]
            columns = (present & (self.readers[pages] == 0)).nonzero()[0]
            is_past = self._read_until[pages[columns]] <= read_until
            if are_inner:
                columns = columns[is_past][:count]
            elif not is_past.all() or (level is not None and node.level > level):
                continue
            if len(columns):
                chosen.append((node, columns))
                count -= len(columns)
        for serial in stale:
            del queue[serial]
        return chosen

    def _present(self, node: Node, are_inner: bool) -> Bool:
        """Columns of a node with pages: all, or those that its end does not look back on."""
        present = node.pages[self.number] != 0
        if are_inner:
            size = self._tree.page_size
            present[max(self.group.first_column(node.end, size) - node.start // size, 0) :] = False
        return present

    def _take(self, node: Node, columns: Int64, freed: FreedPages) -> None:
        self._tree.version += 1
        pages = node.pages[self.number]
        for watcher in self._tree.watchers:
            watcher.vanished(node, self.number, columns)
        rescued = None if self._tree.rescuer is None else self._tree.rescuer.take(node, self.number, columns)
        gone = pages[columns if rescued is None else np.setdiff1d(columns, rescued)]
        if len(gone):
            freed.add(gone, owner.node(node.serial), int(self._read_until[gone].max()))
        pages[columns] = 0
        if node.evictable and node.level == 0 and not self.needed_at(node, node.end).all():
            # Nobody can go on from its end: what full groups keep there is dead weight until it is computed again.
            node.level = DONE
            self._tree.reconsider(node)
        self._tree.trim(node)
