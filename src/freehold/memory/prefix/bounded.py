"""The tree's pages of a bounded group: which have readers, and which go first."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from freehold.contract.arrays import Bool, Int32, Int64
from freehold.memory.group import CacheGroup
from freehold.memory.ledger import owner
from freehold.memory.ledger.errors import LeaseError
from freehold.memory.ledger.pool import FreedPages, PagePool
from freehold.memory.prefix.keyed_queue import KeyedQueue
from freehold.memory.prefix.node import Match, Node
from freehold.memory.prefix.retention import DONE, PRIORITY_MAX
from freehold.memory.prefix.watcher import Rescuer, Watcher


class Prefixes(Protocol):
    """The part of the prefix tree that bounded pages need."""

    version: int
    page_size: int
    rescuer: Rescuer | None

    def node(self, serial: int) -> Node: ...

    def followers(self, node: Node) -> list[Watcher]: ...

    def reconsider(self, node: Node) -> None: ...

    def trim(self, node: Node) -> None: ...


class BoundedPages:
    """Pages of a bounded group are borrowed one by one. If a pin held every old window on its path, long prefixes could
    block a small pool. So a pin protects pages of full groups, but of bounded ones only borrowed pages.

    A page that is not borrowed may leave a node even if the node is held: a hole (0) stays in its column. First go
    pages outside the lookback of any node's end, least recently used first; then the others, those retained by hints
    last. Pages that a step in flight may read go only as a last resort: they would not be free at once, and a row that
    keeps reading would wait in each step for what it just gave back.
    """

    def __init__(self, tree: Prefixes, number: int, group: CacheGroup, pool: PagePool):
        self._tree = tree
        self.number = number
        self.group = group
        self.pool = pool
        self.page_count = 0  # in the tree
        self.borrowed_count = 0  # of them, those with a reader
        self.readers: Int32 = np.zeros(pool.capacity + 1, np.int32)
        self._read_until: Int64 = np.zeros(pool.capacity + 1, np.int64)  # the last step that may read a page
        # Nodes with pages to give: `inner` ones outside the lookback of the node's end, `ends` any. A node without any
        # is dropped when it surfaces; it is offered again when it gets a page or a page loses its last reader.
        self.inner: KeyedQueue[Node] = KeyedQueue(lambda node: (node.last_used, -node.end))
        self.ends: KeyedQueue[Node] = KeyedQueue(lambda node: (node.level, node.last_used, -node.end))

    @property
    def evictable_count(self) -> int:
        return self.page_count - self.borrowed_count

    # -- borrowing ------------------------------------------------------------------------------------

    def borrow(self, pages: Int32) -> None:
        """Add a reader to each of `pages` [n], which are distinct pages of the tree or 0."""
        pages = pages[pages != 0]
        before = self.readers[pages]
        self.borrowed_count += len(before) - int(np.count_nonzero(before))
        self.readers[pages] = before + 1

    def give_back(self, pages: Int32, fences: int | Int64) -> None:
        """Remove a reader from each of `pages` [n], which may be 0. Steps up to `fences` may still read them. With a
        single fence the pages are distinct; with several a page may repeat. Raise LeaseError if a page has no
        reader."""
        there = pages != 0
        pages = pages[there]
        if isinstance(fences, int):
            left = self.readers[pages] - 1
            self.readers[pages] = left
            self._read_until[pages] = np.maximum(self._read_until[pages], fences)
        else:
            np.subtract.at(self.readers, pages, 1)
            left = self.readers[pages]
            np.maximum.at(self._read_until, pages, fences[there])
        if len(left) and left.min() < 0:
            raise LeaseError(f"group {self.group.name}: page {int(pages[int(left.argmin())])} has no reader")
        unread = np.unique(pages[left == 0])
        self.borrowed_count -= len(unread)
        for by in np.unique(self.pool.owner[unread]).tolist():
            self.offer(self._tree.node(owner.id_of(by)))

    def needed(self, match: Match) -> Int32:
        """Return the pages that a sequence needs to resume from a match, in any order."""
        return np.empty(0, np.int32) if match.node is None else self.needed_at(match.node, match.length)

    def needed_at(self, node: Node, end: int) -> Int32:
        """Return the pages needed to resume from the prefix of `end` tokens, which ends in `node`."""
        size = self._tree.page_size
        first = self.group.first_column(end, size)
        parts: list[Int32] = []
        while node.parent is not None and node.end > first * size:
            begin = node.start // size
            parts.append(node.pages[self.number][max(first - begin, 0) : max(end // size - begin, 0)])
            node = node.parent
        return np.concatenate([*parts, np.empty(0, np.int32)])

    def unread_count(self, match: Match) -> int:
        """Return how many pages a match needs that have no reader yet."""
        return int(np.count_nonzero(self.readers[self.needed(match)] == 0))

    def gain_of(self, rows: list[Int32]) -> int:
        """Return how many pages would lose their last reader if these rows of page tables ended: their own, and tree
        pages only they borrow."""
        pages, counts = np.unique(np.concatenate(rows), return_counts=True)
        return int(np.count_nonzero((pages != 0) & (counts >= self.readers[pages])))

    # -- coming and going -----------------------------------------------------------------------------

    def added(self, node: Node, count: int) -> None:
        """Count `count` pages that a node got: it owns them, and none is borrowed."""
        self.page_count += count
        self.offer(node)

    def offer(self, node: Node) -> None:
        """Queue a node that may have more pages to give than before."""
        self.inner.put(node)
        self.ends.put(node)

    def reconsider(self, node: Node) -> None:
        """Requeue a node whose use or retention changed."""
        for queue in (self.inner, self.ends):
            if node in queue:
                queue.put(node)

    def removed(self, count: int, pages: Int32, node: Node, freed: FreedPages) -> None:
        """Count `count` pages that leave the tree with a leaf's end; free `pages` [n] of them, or 0."""
        self.page_count -= count
        pages = pages[pages != 0]
        if len(pages):
            freed.add(pages, owner.node(node.serial), int(self._read_until[pages].max()))

    def forget(self, node: Node) -> None:
        """Remove a node that left the tree."""
        self.inner.forget(node)
        self.ends.forget(node)

    def inner_columns(self, node: Node) -> Int64:
        """Return columns with unread pages outside the lookback of the node's end."""
        size = self._tree.page_size
        return self._unread(node, max(self.group.first_column(node.end, size) - node.start // size, 0))

    def all_columns(self, node: Node) -> Int64:
        """Return columns with unread pages."""
        return self._unread(node, node.page_count)

    def _unread(self, node: Node, count: int) -> Int64:
        pages = node.pages[self.number][:count]
        return ((pages != 0) & (self.readers[pages] == 0)).nonzero()[0]

    def evict(self, count: int) -> int:
        """Free `count` unread pages, or as many as there are. Return how many. Holes stay in their columns. If part of
        the window before a node's end goes, all of it goes."""
        freed, left = FreedPages(), count
        for may_be_read, level in ((False, 0), (True, 0), (True, PRIORITY_MAX)):
            left -= self._evict_inner(left, may_be_read, freed)
            left -= self._evict_ends(left, may_be_read, level, freed)
        freed.give_back(self.pool)
        return count - left

    def _evict_inner(self, count: int, may_be_read: bool, freed: FreedPages) -> int:
        """Evict up to `count` pages that no end looks back on. Return how many. `may_be_read`: by steps in flight."""
        given, aside = 0, list[Node]()
        while given < count and (node := self.inner.peek()) is not None:
            unread = self.inner_columns(node)
            columns = unread if may_be_read else unread[~self.in_use(node, unread)]
            if len(columns):
                given += self._take(node, columns[: count - given], freed)
            else:
                self.inner.pop()
                aside += [node] if len(unread) else []
        for node in aside:
            self.inner.put(node)
        return given

    def _evict_ends(self, count: int, may_be_read: bool, level: int, freed: FreedPages) -> int:
        """Evict all pages of nodes with at most `level`, until `count` pages are gone. Return how many."""
        given, aside = 0, list[Node]()
        while given < count and (node := self.ends.peek()) is not None and node.level <= level:
            unread = self.all_columns(node)
            if len(unread) and (may_be_read or not self.in_use(node, unread).any()):
                given += self._take(node, unread, freed)
            else:
                self.ends.pop()
                aside += [node] if len(unread) else []
        for node in aside:
            self.ends.put(node)
        return given

    def in_use(self, node: Node, columns: Int64) -> Bool:
        """Return whether a step in flight may read each column's page, bool [n]."""
        return self._read_until[node.pages[self.number][columns]] > self.pool.epochs.completed

    def _take(self, node: Node, columns: Int64, freed: FreedPages) -> int:
        """Evict pages of a node. Return how many."""
        self._tree.version += 1
        self.page_count -= len(columns)
        pages = node.pages[self.number]
        for watcher in self._tree.followers(node):
            watcher.vanished(node, self.number, columns)
        rescued = None if self._tree.rescuer is None else self._tree.rescuer.take(node, self.number, columns)
        gone = pages[columns if rescued is None else np.setdiff1d(columns, rescued)]
        if len(gone):
            freed.add(gone, owner.node(node.serial), int(self._read_until[gone].max()))
        pages[columns] = 0
        if node.evictable and node.level == 0 and not self.needed_at(node, node.end).all():
            # No sequence can resume from its end, so its pages of full groups are useless until the window is
            # recomputed.
            node.level = DONE
            self._tree.reconsider(node)
        self._tree.trim(node)
        return len(columns)
