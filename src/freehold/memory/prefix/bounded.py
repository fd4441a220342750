"""The tree's pages of a bounded group: which of them somebody reads, and which go first."""

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
    """What bounded pages need of the prefix tree."""

    version: int
    page_size: int
    rescuer: Rescuer | None

    def node(self, serial: int) -> Node: ...

    def followers(self, node: Node) -> list[Watcher]: ...

    def reconsider(self, node: Node) -> None: ...

    def trim(self, node: Node) -> None: ...


class BoundedPages:
    """Pages of a bounded group are borrowed one by one. A pin on a path would hold every old window on it, and a small
    pool could be wedged by long prefixes; so a pin protects pages of full groups, and of bounded ones what is borrowed.

    A page that is not borrowed may leave a node whatever holds that node: a hole (0) stays in its column. First go the
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
        # Nodes that have pages to give: `inner` ones that their end does not look back on, `ends` any. A node that has
        # none is dropped when it surfaces; it is offered again when a page of it comes, or has no reader any more.
        self.inner: KeyedQueue[Node] = KeyedQueue(lambda node: (node.last_used, -node.end))
        self.ends: KeyedQueue[Node] = KeyedQueue(lambda node: (node.level, node.last_used, -node.end))

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
        """The pages that a sequence needs to go on from a match, in any order."""
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
        return np.concatenate([*parts, np.empty(0, np.int32)])

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
        self.offer(node)

    def offer(self, node: Node) -> None:
        """A node may have more pages to give than before."""
        self.inner.put(node)
        self.ends.put(node)

    def reconsider(self, node: Node) -> None:
        """A node was used, or retained, or not any more."""
        for queue in (self.inner, self.ends):
            if node in queue:
                queue.put(node)

    def removed(self, count: int, pages: Int32, node: Node, freed: FreedPages) -> None:
        """`count` pages of a leaf's end leave the tree with it; of them `pages` [n], or 0, are nobody's then."""
        self.page_count -= count
        pages = pages[pages != 0]
        if len(pages):
            freed.add(pages, owner.node(node.serial), int(self._read_until[pages].max()))

    def forget(self, node: Node) -> None:
        """A node has left the tree."""
        self.inner.forget(node)
        self.ends.forget(node)

    def inner_columns(self, node: Node) -> Int64:
        """Columns with pages that nothing reads and that the node's end does not look back on."""
        size = self._tree.page_size
        return self._unread(node, max(self.group.first_column(node.end, size) - node.start // size, 0))

    def all_columns(self, node: Node) -> Int64:
        """Columns with pages that nothing reads."""
        return self._unread(node, node.page_count)

    def _unread(self, node: Node, count: int) -> Int64:
        pages = node.pages[self.number][:count]
        return ((pages != 0) & (self.readers[pages] == 0)).nonzero()[0]

    def evict(self, count: int) -> int:
        """Give `count` pages back that nothing reads, or what there is -> how many. Holes stay in their columns. Of a
        window that a node's end looks back on, nothing is kept if a part of it goes."""
        freed, left = FreedPages(), count
        for may_be_read, level in ((False, 0), (True, 0), (True, PRIORITY_MAX)):
            left -= self._evict_inner(left, may_be_read, freed)
            left -= self._evict_ends(left, may_be_read, level, freed)
        freed.give_back(self.pool)
        return count - left

    def _evict_inner(self, count: int, may_be_read: bool, freed: FreedPages) -> int:
        """Evict up to `count` pages that no end looks back on -> how many. `may_be_read`: by steps in flight."""
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
        """Evict all of nodes that have at most a `level`, until `count` pages are gone -> how many."""
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
        """Whether a step in flight may read them, bool [n]."""
        return self._read_until[node.pages[self.number][columns]] > self.pool.epochs.completed

    def _take(self, node: Node, columns: Int64, freed: FreedPages) -> int:
        """Evict pages of a node -> how many."""
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
            # No sequence can go on from its end: what full groups keep there is dead weight until it is computed again.
            node.level = DONE
            self._tree.reconsider(node)
        self._tree.trim(node)
        return len(columns)
