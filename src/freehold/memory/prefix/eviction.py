"""Eviction order of the unpinned leaves of the prefix tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from freehold.memory.prefix.keyed_queue import KeyedQueue
from freehold.memory.prefix.reuse import CLASSES, ReuseStatistics, class_of

if TYPE_CHECKING:
    from freehold.memory.prefix.node import Node

Key = tuple[int, ...]


def lru(node: Node) -> Key:
    """Evict the least recently used."""
    return node.level, node.last_used


def lfu(node: Node) -> Key:
    """Evict the least often hit, then the least recently used."""
    return node.level, node.hits, node.last_used


def fifo(node: Node) -> Key:
    """Evict the oldest."""
    return node.level, node.created


def priority(node: Node) -> Key:
    """Evict the lowest priority of the requests that used it, then the least recently used."""
    return node.level, node.priority, node.last_used


POLICIES: dict[str, Callable[[Node], Key]] = {"lru": lru, "lfu": lfu, "fifo": fifo, "priority": priority}
REUSE = "reuse"  # least likely to be reused soon, as learned by `ReuseStatistics`


Candidates = KeyedQueue["Node"]


def candidates(policy: Callable[[Node], Key]) -> Candidates:
    """Return a queue of evictable leaves."""
    return KeyedQueue(lambda node: policy(node) if node.evictable else None)


class ReuseQueue:
    """Candidates by number of hits, least recently used first; the head worth least goes first. Among pages hit equally
    often, the one that has waited longest is nearly always worth least."""

    def __init__(self, statistics: ReuseStatistics, clock: Callable[[], int]):
        self._statistics = statistics
        self._clock = clock
        self._queues = [candidates(lru) for _ in range(CLASSES)]

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues)

    def __contains__(self, node: Node) -> bool:
        return any(node in queue for queue in self._queues)

    def put(self, node: Node) -> None:
        """Queue a leaf under its current key, if it is evictable."""
        kind = class_of(node.hits)
        for other in range(CLASSES):
            if other != kind:
                self._queues[other].forget(node)
        self._queues[kind].put(node)

    def forget(self, node: Node) -> None:
        """Remove a node that left the tree."""
        for queue in self._queues:
            queue.forget(node)

    def heaps(self) -> Iterator[KeyedQueue[Node]]:
        """Yield all inner queues, for the audit."""
        yield from self._queues

    def peek(self) -> Node | None:
        """Return the next leaf to evict, or None."""
        heads = [node for queue in self._queues if (node := queue.peek()) is not None]
        return min(heads, key=self._worth) if heads else None

    def _worth(self, node: Node) -> tuple[int, float, int]:
        age = self._clock() - node.last_used
        return node.level, self._statistics.worth(node.hits, age), node.last_used


class FairEviction:
    """One queue for each tenant (salt). While some tenants hold more than `quota` pages in the tree, the largest gives
    first; otherwise the one with the smallest key. Without a quota all are one tenant.

    A quota is no limit: a tenant may fill memory that no other tenant wants.
    """

    def __init__(self, policy: str, quota: int | None, statistics: ReuseStatistics, clock: Callable[[], int]):
        known = (REUSE, *POLICIES)
        if policy not in known:
            raise ValueError(f"eviction policy must be one of {', '.join(known)}, not '{policy}'")
        self._key = POLICIES.get(policy, lru)  # between tenants
        self._new_queue: Callable[[], Candidates | ReuseQueue] = (
            (lambda: ReuseQueue(statistics, clock)) if policy == REUSE else (lambda: candidates(self._key))
        )
        self._quota = quota
        self._queues: dict[str, Candidates | ReuseQueue] = {}  # none of them empty
        self._tenants: KeyedQueue[str] = KeyedQueue(self._tenant_key)
        self.page_counts: dict[str, int] | None = None if quota is None else {}  # in the tree, by tenant

    def __contains__(self, node: Node) -> bool:
        return node in self._queues.get(self._tenant(node), ())

    def _tenant(self, node: Node) -> str:
        return "" if self._quota is None else node.namespace.salt

    def count(self, salt: str, change: int) -> None:
        """Count pages of a tenant that entered or left the tree."""
        if self._quota is None or self.page_counts is None:
            return
        pages = self.page_counts[salt] = self.page_counts.get(salt, 0) + change
        if pages == 0:
            del self.page_counts[salt]
        if salt in self._tenants:
            self._tenants.put(salt)

    def put(self, node: Node) -> None:
        """Queue a leaf under its current key, if it is evictable; otherwise remove it."""
        salt = self._tenant(node)
        if salt not in self._queues:
            self._queues[salt] = self._new_queue()
        self._queues[salt].put(node)
        self._settle(salt)

    def forget(self, node: Node) -> None:
        """Remove a node that left the tree or can't be evicted now."""
        salt = self._tenant(node)
        if salt in self._queues:
            self._queues[salt].forget(node)
            self._settle(salt)

    def _settle(self, salt: str) -> None:
        """Update a tenant's place after a change of its head."""
        if self._quota is not None:
            self._tenants.put(salt)
        if len(self._queues[salt]) == 0:
            del self._queues[salt]

    def heaps(self) -> Iterator[KeyedQueue[Node] | KeyedQueue[str]]:
        """Yield all inner queues, for the audit."""
        yield self._tenants
        for queue in self._queues.values():
            yield from queue.heaps() if isinstance(queue, ReuseQueue) else [queue]

    def peek(self) -> Node | None:
        """Return the next leaf to evict, or None. It stays a candidate."""
        queue = self._queues.get(self._tenants.peek() or "")
        return None if queue is None else queue.peek()

    def _tenant_key(self, salt: str) -> tuple[int, ...] | None:
        """Return a key that sorts tenants over quota first, largest first; then by the key of their next leaf."""
        head = self._queues[salt].peek() if salt in self._queues else None
        if head is None:
            return None
        pages = (self.page_counts or {}).get(salt, 0)
        return (0, -pages) if self._quota is not None and pages > self._quota else (1, *self._key(head))
