"""Pins on prefixes: what may not be evicted, up to the root."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

from freehold.memory.ledger.errors import LeaseError
from freehold.memory.prefix.node import Match, Namespace, Node, PinKind


class Prefixes(Protocol):
    """The part of the prefix tree that holds need."""

    page_size: int
    version: int

    def root(self, namespace: Namespace) -> Node: ...

    def path(self, node: Node) -> list[Node]: ...

    def split(self, node: Node, at: int) -> Node: ...

    def released(self, node: Node) -> None: ...


class Holds:
    """A pin names the node where a prefix ends and holds its whole path. `page_count` pages of each group are held,
    `kept_page_count` of them by operators' pins."""

    def __init__(self, tree: Prefixes):
        self._tree = tree
        self.page_count = 0
        self.kept_page_count = 0

    def pin(self, match: Match, kind: PinKind) -> Node:
        """Pin a matched prefix. Return the node that ends where the match ends. Pinning does not count as a use.

        Raise LeaseError if the tree has changed since the match: match again.
        """
        if match.version != self._tree.version:
            raise LeaseError("the prefix tree has changed since the match")
        node = match.node or self._tree.root(match.namespace)
        if match.length < node.end:
            node = self._tree.split(node, match.length)
        self.add(node, kind)
        return node

    def add(self, node: Node, kind: PinKind) -> None:
        """Add a pin to a node."""
        node.pins[kind] += 1
        self._hold(node)
        if kind is PinKind.OPERATOR:
            self._keep(node)

    def unpin(self, node: Node, kind: PinKind, fence: int) -> None:
        """Drop one pin; `fence` is the last step that may read the prefix under it."""
        if node.pins[kind] == 0:
            raise LeaseError(f"{node!r} has no {kind.name} pin to drop")
        node.pins[kind] -= 1
        for used in self._tree.path(node):
            used.fence = max(used.fence, fence)
        if kind is PinKind.OPERATOR:
            self._unkeep(node)
        self._unhold(node)

    def repin(self, old: Node, new: Node, kind: PinKind, fence: int) -> None:
        """Move a pin along a path without unprotecting the prefix in between."""
        if old is not new:
            self.add(new, kind)
            self.unpin(old, kind, fence)

    def grown(self, node: Node, pages: int) -> None:
        """Count `pages` added to a node."""
        self.page_count += pages if node.holds else 0
        self.kept_page_count += pages if node.kept else 0

    def _hold(self, node: Node) -> None:
        step: Node | None = node
        while step is not None:
            step.holds += 1
            if step.holds > 1:
                return
            self.page_count += step.page_count
            step = step.parent

    def _unhold(self, node: Node) -> None:
        step: Node | None = node
        while step is not None:
            step.holds -= 1
            if step.holds > 0:
                return
            self.page_count -= step.page_count
            parent = step.parent
            self._tree.released(step)
            step = parent

    def _keep(self, node: Node) -> None:
        step: Node | None = node
        while step is not None:
            step.kept += 1
            if step.kept > 1:
                return
            self.kept_page_count += step.page_count
            step = step.parent

    def _unkeep(self, node: Node) -> None:
        step: Node | None = node
        while step is not None:
            step.kept -= 1
            if step.kept > 0:
                return
            self.kept_page_count -= step.page_count
            step = step.parent

    def unheld_page_count(self, match: Match, released: Collection[Node] = ()) -> int:
        """Return pages of the match that are evictable now but not once it is pinned. `released` nodes count as
        unheld."""
        node, end, count = match.node, match.length, 0
        while node is not None and (node.holds == 0 or node in released):
            count += (end - node.start) // self._tree.page_size
            end, node = node.start, node.parent
        return count

    def only_by(self, nodes: Sequence[Node]) -> set[Node]:
        """Return the nodes that would become unheld if one pin on each of `nodes` were dropped."""
        dropped: Counter[Node] = Counter()
        released: set[Node] = set()
        stack = list(nodes)
        while stack:
            node = stack.pop()
            dropped[node] += 1
            if dropped[node] == node.holds:
                released.add(node)
                if node.parent is not None:
                    stack.append(node.parent)
        return released
