"""Retention levels of nodes in the prefix tree, set by hints within a budget, until they fade."""

from __future__ import annotations

from typing import Protocol

from freehold.memory.prefix.keyed_queue import KeyedQueue
from freehold.memory.prefix.node import Node
from freehold.memory.prefix.retention import DONE, Retention

FADED_MAX = 64  # levels halved per iteration; the rest follow later


class Prefixes(Protocol):
    """The part of the prefix tree that hints need."""

    page_size: int

    def path(self, node: Node) -> list[Node]: ...

    def split(self, node: Node, at: int) -> Node: ...

    def reconsider(self, node: Node) -> None: ...


class Hints:
    """`page_count` pages of each group have a level above 0. Hints that would exceed `limit` are refused."""

    def __init__(self, tree: Prefixes, limit: int):
        self._tree = tree
        self._limit = limit
        self.fading: KeyedQueue[Node] = KeyedQueue(lambda node: node.fades_at if node.level > 0 else None)
        self.page_count = 0

    def retain(self, node: Node, hint: Retention, now: float) -> int:
        """Apply a hint to the prefix that ends at `node`. Return the number of tokens kept: whole pages, within
        budget."""
        tree = self._tree
        if hint.priority == 0:
            self._discount(node)
            return 0
        end = node.end if hint.end is None else min(node.end, hint.end)
        end -= end % tree.page_size
        kept = 0
        for part in tree.path(node):
            if part.start >= end:
                break
            part = tree.split(part, end) if part.end > end else part
            if part.level <= 0:
                if self.page_count + part.page_count > self._limit:
                    break
                self.page_count += part.page_count
            if hint.priority >= part.level:
                part.level, part.ttl, part.fades_at = hint.priority, hint.ttl, now + hint.ttl
                self.fading.put(part)
                tree.reconsider(part)
            kept = part.end
        return kept

    def _discount(self, node: Node) -> None:
        """Lower the level of nodes that only this prefix uses: no reuse is expected."""
        step = node
        while step.parent is not None and max(step.holds, len(step.children)) <= 1:
            if step.level <= 0:
                step.level = DONE
                self._tree.reconsider(step)
            step = step.parent

    def split(self, upper: Node) -> None:
        """Queue `upper`, which was cut from a node and has its level."""
        self.fading.put(upper)

    def fade(self, now: float) -> None:
        """Halve the levels that are due, a few at a time. Called in every iteration; `now` in seconds of the
        scheduler's clock."""
        for _ in range(FADED_MAX):
            node = self.fading.due(now)
            if node is None:
                return
            halvings = 1 + int((now - node.fades_at) / node.ttl)
            node.level >>= min(halvings, 8)
            node.fades_at += halvings * node.ttl
            if node.level <= 0:
                self.page_count -= node.page_count
            self.fading.put(node)
            self._tree.reconsider(node)
