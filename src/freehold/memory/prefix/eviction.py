"""Which unpinned leaf of the prefix tree goes first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

from freehold.memory.prefix.reuse import CLASSES, ReuseStatistics, class_of

if TYPE_CHECKING:
    from freehold.memory.prefix.node import Node

Key = tuple[int, int, int]
STALE_MAX = 64


def lru(node: Node) -> Key:
    """Least recently used."""
    return node.level, node.last_used, 0


def lfu(node: Node) -> Key:
    """Least often hit, then least recently used."""
    return node.level, node.hits, node.last_used


def fifo(node: Node) -> Key:
    """Oldest first."""
    return node.level, node.created, 0


def priority(node: Node) -> Key:
    """Lowest priority of the requests that used it, then least recently used."""
    return node.level, node.priority, node.last_used


POLICIES: dict[str, Callable[[Node], Key]] = {"lru": lru, "lfu": lfu, "fifo": fifo, "priority": priority}
REUSE = "reuse"  # what is least likely to be asked for soon, as `ReuseStatistics` have learned


class EvictionQueue:
    """A heap of candidates; smallest key first, O(log n) an operation.

    Entries are checked when they surface instead of when a node changes: a node whose key has grown
    since goes back with its new key, one that may no longer be evicted is dropped. A key that has become
    smaller must be told (`lower`).
    """

    def __init__(self, key: Callable[[Node], Key]):
        self._key = key
        self._heap: list[tuple[Key, int, Node]] = []
        self._pushes = 0
        self._stale = 0  # entries left behind by nodes whose key has become smaller, at most

    def push(self, node: Node) -> None:
        """Make an evictable leaf a candidate. Does nothing if it already is one."""
        if not node.queued:
            self.lower(node)

    def lower(self, node: Node) -> None:
        """The node's key has become smaller. An entry with the old one may stay behind; it is checked when
        it surfaces, like any other."""
        self._stale += node.queued
        node.queued = True
        self._pushes += 1
        heapq.heappush(self._heap, (self._key(node), self._pushes, node))
        if self._stale > len(self._heap) // 2 + STALE_MAX:
            self._rebuild()

    def _rebuild(self) -> None:
        """One entry for each candidate."""
        nodes = {node.serial: node for _, _, node in self._heap}.values()
        for node in nodes:
            node.queued = node.evictable
        self._heap = [(self._key(node), node.serial, node) for node in nodes if node.evictable]
        heapq.heapify(self._heap)
        self._pushes = max((serial for _, serial, _ in self._heap), default=0)
        self._stale = 0

    def peek(self) -> Node | None:
        """The evictable leaf with the smallest key, or None."""
        while self._heap:
            key, _, node = self._heap[0]
            if node.evictable and self._key(node) == key:
                return node
            heapq.heappop(self._heap)
            node.queued = False
            if node.evictable:
                self.push(node)
        return None

    def pop(self) -> Node | None:
        """The same, taken out."""
        node = self.peek()
        if node is not None:
            heapq.heappop(self._heap)
            node.queued = False
        return node


class ReuseQueue:
    """Candidates by how often they were hit, least recently used first; the head that is worth least goes first.
    Among pages hit equally often the one that has waited longest is nearly always that."""

    def __init__(self, statistics: ReuseStatistics, clock: Callable[[], int]):
        self._statistics = statistics
        self._clock = clock
        self._queues = [EvictionQueue(lru) for _ in range(CLASSES)]

    def lower(self, node: Node) -> None:
        """The node is a candidate, and its level may have become smaller."""
        self._queues[class_of(node.hits)].lower(node)

    def peek(self) -> Node | None:
        """The one to go next, or None."""
        heads = [node for kind in range(CLASSES) if (node := self._head(kind)) is not None]
        return min(heads, key=self._worth) if heads else None

    def pop(self) -> Node | None:
        """The same, taken out."""
        node = self.peek()
        return None if node is None else self._queues[class_of(node.hits)].pop()

    def _head(self, kind: int) -> Node | None:
        """What was hit since it was queued has gone on to another class."""
        queue = self._queues[kind]
        while (node := queue.peek()) is not None and class_of(node.hits) != kind:
            queue.pop()
            self.lower(node)
        return node

    def _worth(self, node: Node) -> tuple[int, float, int]:
        age = self._clock() - node.last_used
        return node.level, self._statistics.worth(node.hits, age), node.last_used


class FairEviction:
    """One queue for each tenant (salt). While some hold more than `quota` pages in the tree, the one that
    holds most gives first; otherwise whoever has the smallest key. Without a quota all are one tenant.

    A quota is no limit: a tenant may fill memory that nobody else wants.
    """

    def __init__(self, policy: str, quota: int | None, statistics: ReuseStatistics, clock: Callable[[], int]):
        known = (REUSE, *POLICIES)
        if policy not in known:
            raise ValueError(f"eviction policy must be one of {', '.join(known)}, not '{policy}'")
        self._key = POLICIES.get(policy, lru)  # between tenants
        self._new_queue: Callable[[], EvictionQueue | ReuseQueue] = (
            (lambda: ReuseQueue(statistics, clock)) if policy == REUSE else (lambda: EvictionQueue(self._key))
        )
        self._quota = quota
        self._queues: dict[str, EvictionQueue | ReuseQueue] = {}
        # The smallest key of each queue, or a smaller one; entries that differ from `_announced` are stale.
        self._heads: list[tuple[Key, str]] = []
        self._announced: dict[str, Key] = {}
        self.page_counts: dict[str, int] = {}  # in the tree, by tenant, while there is a quota
        self._over: set[str] = set()

    def count(self, salt: str, change: int) -> None:
        """Pages of a tenant came to the tree, or left it."""
        if self._quota is None:
            return
        pages = self.page_counts.get(salt, 0) + change
        self.page_counts[salt] = pages
        if pages > self._quota:
            self._over.add(salt)
        else:
            self._over.discard(salt)
        if pages == 0:
            del self.page_counts[salt]

    def push(self, node: Node) -> None:
        """Make an evictable leaf a candidate. Does nothing if it already is one."""
        if not node.queued:
            self.lower(node)

    def lower(self, node: Node) -> None:
        """The node's key has become smaller."""
        salt = "" if self._quota is None else node.namespace.salt
        queue = self._queues.get(salt)
        if queue is None:
            queue = self._queues[salt] = self._new_queue()
        queue.lower(node)
        if self._quota is not None:
            self._announce(salt, self._key(node))

    def pop(self) -> Node | None:
        """The next to go, or None."""
        if self._quota is None:
            return self._queues[""].pop() if self._queues else None
        for salt in sorted(self._over, key=lambda salt: -self.page_counts[salt]):
            queue = self._queues.get(salt)
            if queue is None:
                continue
            node = queue.pop()
            if queue.peek() is None:
                del self._queues[salt]
                self._announced.pop(salt, None)
            if node is not None:
                return node
        while self._heads:
            key, salt = heapq.heappop(self._heads)
            if self._announced.get(salt) != key:
                continue
            del self._announced[salt]
            node = self._queues[salt].peek()
            if node is not None and self._key(node) == key:
                self._queues[salt].pop()
                self._announce_next(salt)
                return node
            self._announce_next(salt)
        return None

    def _announce_next(self, salt: str) -> None:
        following = self._queues[salt].peek()
        if following is None:
            del self._queues[salt]
        else:
            self._announce(salt, self._key(following))

    def _announce(self, salt: str, key: Key) -> None:
        if salt not in self._announced or key < self._announced[salt]:
            self._announced[salt] = key
            heapq.heappush(self._heads, (key, salt))
            if len(self._heads) > 2 * len(self._announced) + STALE_MAX:
                self._heads = [(key, salt) for salt, key in self._announced.items()]
                heapq.heapify(self._heads)
