"""Recount of the prefix tree: each node by itself, then the totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from freehold.memory.ledger.errors import AuditError
from freehold.memory.prefix.bounded import BoundedPages
from freehold.memory.prefix.keyed_queue import KeyedQueue
from freehold.memory.prefix.node import Node, PinKind
from freehold.memory.prefix.tree import PrefixTree

NODES_AT_ONCE = 128  # in a slice


def check_node(tree: PrefixTree, node: Node) -> None:
    """Compare a node with its parent, its pages and the queues. Raise AuditError."""
    parent = node.parent
    if parent is not None:
        key = node.tokens[: tree.page_size].tobytes()
        if parent.children.get(key) is not node or node.end != parent.end + len(node.tokens):
            raise AuditError(f"{parent!r} and {node!r} disagree about each other")
        if parent.parent is not None and parent.hits < node.hits:
            raise AuditError(f"{node!r} has {node.hits} hits, and {parent!r} before it only {parent.hits}")
    are_bounded = {bounded.number for bounded in tree.bounded}
    for number, part in enumerate(node.pages):
        if len(part) * tree.page_size != len(node.tokens):
            raise AuditError(f"{node!r}: {len(part)} pages for {len(node.tokens)} tokens")
        if number not in are_bounded and np.count_nonzero(part) != len(part):
            raise AuditError(f"{node!r}: group {number} has holes")
    if node.evictable and node not in tree.candidates:
        raise AuditError(f"{node!r} is evictable but not a candidate for eviction")
    if node.level > 0 and node not in tree.hints.fading:
        raise AuditError(f"{node!r} has level {node.level}, and nothing will lower it")
    for bounded in tree.bounded:
        _check_offered(bounded, node)


def _check_offered(bounded: BoundedPages, node: Node) -> None:
    if len(bounded.all_columns(node)) and node not in bounded.ends:
        raise AuditError(f"{node!r} has unread pages of group {bounded.number}, and eviction does not know")
    if len(bounded.inner_columns(node)) and node not in bounded.inner:
        raise AuditError(f"{node!r} has pages of group {bounded.number} behind its end, and eviction does not know")


class TreeCount:
    """Totals over the nodes of a tree, compared with its counters. `pins` counts the pins of each kind that holders
    name, by the serial of the node."""

    def __init__(self, tree: PrefixTree, pins: Counter[tuple[int, PinKind]]):
        self._tree = tree
        self._pins = pins
        self._pages = self._held = self._kept = self._retained = self._children = 0
        self._bounded_pages = dict.fromkeys((bounded.number for bounded in tree.bounded), 0)
        self._by_tenant: Counter[str] = Counter()
        # Held children and kept children, by the serial of their parent.
        self._held_children: Counter[int] = Counter()
        self._kept_children: Counter[int] = Counter()

    def add(self, node: Node) -> None:
        """Count a node. Raise AuditError if its pins are not the pins its holders name."""
        self._pages += node.page_count
        self._held += node.page_count if node.holds else 0
        self._kept += node.page_count if node.kept else 0
        self._retained += node.page_count if node.level > 0 else 0
        self._children += len(node.children) - (node.parent is not None)
        self._by_tenant[node.namespace.salt] += node.page_count
        if node.parent is not None:
            self._held_children[node.parent.serial] += node.holds > 0
            self._kept_children[node.parent.serial] += node.kept > 0
        for number in self._bounded_pages:
            self._bounded_pages[number] += int(np.count_nonzero(node.pages[number]))
        for kind in PinKind:
            named = self._pins.pop((node.serial, kind), 0)
            if node.pins[kind] != named:
                raise AuditError(f"{node!r}: {node.pins[kind]} {kind.name.lower()} pins; counted {named}")

    def finish(self) -> Iterator[None]:
        """Compare with the tree's counters, in slices. Raise AuditError."""
        self._check_totals()
        for at, node in enumerate(self._tree.nodes()):
            self._check_holds(node)
            if at % NODES_AT_ONCE == NODES_AT_ONCE - 1:
                yield
        for heap in _queues(self._tree):
            yield
            yield from heap.checking()

    def _check_totals(self) -> None:
        tree = self._tree
        kept = (tree.page_count, tree.holds.page_count, tree.holds.kept_page_count, tree.hints.page_count)
        counted = (self._pages, self._held, self._kept, self._retained)
        if counted != kept:
            raise AuditError(f"tree counts {kept} pages in all, held, kept and retained; recounted {counted}")
        if self._children:
            raise AuditError(f"the index of serial numbers has {self._children} nodes too few or too many")
        for bounded in tree.bounded:
            pages = self._bounded_pages[bounded.number]
            if pages != bounded.page_count:
                raise AuditError(
                    f"group {bounded.number}: the tree counts {bounded.page_count} pages; recounted {pages}"
                )
        tenants = {salt: pages for salt, pages in self._by_tenant.items() if pages}
        if tree.candidates.page_counts is not None and tree.candidates.page_counts != tenants:
            raise AuditError(f"tenants have {tree.candidates.page_counts} pages; recounted {tenants}")
        if self._pins:
            raise AuditError(f"nodes that are not in the tree are pinned: {sorted(self._pins)}")

    def _check_holds(self, node: Node) -> None:
        holds = sum(node.pins) + self._held_children[node.serial]
        kept = node.pins[PinKind.OPERATOR] + self._kept_children[node.serial]
        if (node.holds, node.kept) != (holds, kept):
            raise AuditError(f"{node!r} counts {node.holds} holds, {node.kept} of operators; counted {holds}, {kept}")


def _queues(tree: PrefixTree) -> Iterator[KeyedQueue[Node] | KeyedQueue[str]]:
    """Yield every queue of eviction and fading."""
    yield from tree.candidates.heaps()
    yield tree.hints.fading
    for bounded in tree.bounded:
        yield from (bounded.inner, bounded.ends)
