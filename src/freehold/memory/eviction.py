"""Which unpinned leaf of the prefix tree goes first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freehold.memory.node import Node

Key = tuple[int, int]


def lru(node: Node) -> Key:
    """Least recently used."""
    return node.last_used, 0


def lfu(node: Node) -> Key:
    """Least often hit, then least recently used."""
    return node.hits, node.last_used


def fifo(node: Node) -> Key:
    """Oldest first."""
    return node.created, 0


def priority(node: Node) -> Key:
    """Lowest priority of the requests that used it, then least recently used."""
    return node.priority, node.last_used


POLICIES: dict[str, Callable[[Node], Key]] = {"lru": lru, "lfu": lfu, "fifo": fifo, "priority": priority}


class EvictionQueue:
    """A heap of candidates; smallest key first, O(log n) an operation.

    Entries are checked when they surface instead of when a node changes: a node whose key has grown
    since goes back with its new key, one that may no longer be evicted is dropped.
    """

    def __init__(self, policy: str):
        if policy not in POLICIES:
            raise ValueError(f"eviction policy must be one of {', '.join(POLICIES)}, not '{policy}'")
        self._key = POLICIES[policy]
        self._heap: list[tuple[Key, int, Node]] = []
        self._pushes = 0

    def push(self, node: Node) -> None:
        """Make an evictable leaf a candidate. Does nothing if it already is one."""
        if node.queued:
            return
        node.queued = True
        self._pushes += 1
        heapq.heappush(self._heap, (self._key(node), self._pushes, node))

    def pop(self) -> Node | None:
        """The evictable leaf with the smallest key, or None."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            node.queued = False
            if not node.evictable:
                continue
            if self._key(node) != key:
                self.push(node)
                continue
            return node
        return None
