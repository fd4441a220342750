"""Proof of conservation: recount every page from its holders and compare with the ledger."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from freehold.arrays import Int32, Int64
from freehold.memory.lease import Lease
from freehold.memory.ledger import owner
from freehold.memory.ledger.errors import AuditError
from freehold.memory.parts import Parts
from freehold.memory.prefix.bounded import BoundedPages
from freehold.memory.prefix.node import Node, PinKind

NODES_AT_ONCE = 128  # of an audit's slice
NOBODY = -1


@dataclass(frozen=True)
class PageCounts:
    """Pages of one pool by owner. free + limbo + lease + tail + pinned + tree == capacity. Of a bounded group, pinned
    pages are those that somebody borrows."""

    capacity: int
    free: int
    limbo: int
    lease: int
    tail: int  # partial last pages of parked sessions
    pinned: int  # owned by the tree, on a path that somebody uses
    tree: int  # owned by the tree, evictable

    @property
    def held(self) -> int:
        return self.capacity - self.free

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("capacity", "free", "limbo", "lease", "tail", "pinned", "tree")}


def count_pages(memory: Parts, group: int = 0) -> PageCounts:
    """Pages by owner, from counters kept along the way: cheap, made for metrics."""
    pool, tree = memory.pools[group], memory.tree
    in_tree, pinned = tree.page_count, tree.holds.page_count
    for bounded in tree.bounded:
        if bounded.number == group:
            in_tree, pinned = bounded.page_count, bounded.borrowed_count
    return PageCounts(
        capacity=pool.capacity,
        free=pool.free_count,
        limbo=pool.limbo_count,
        lease=pool.held_count - in_tree - memory.tails.page_count,
        tail=memory.tails.page_count,
        pinned=pinned,
        tree=in_tree - pinned,
    )


def audit(memory: Parts) -> None:
    """Raise AuditError unless tree, leases, limbo and free lists add up to exactly the ledger."""
    for _ in auditing(memory):
        pass


def auditing(memory: Parts) -> Iterator[None]:
    """The audit in slices of about a millisecond. Between them nothing in memory may change; if it does, begin
    anew. Raises AuditError."""
    tree_count = TreeCount(memory)
    claims = [PoolClaims(memory, group) for group in range(len(memory.pools))]
    for nodes in _batched(memory.tree.nodes(), NODES_AT_ONCE):
        for node in nodes:
            tree_count.add(node)
        for claim in claims:
            pages = [node.pages[claim.group] for node in nodes]
            claim.take(pages, [owner.node(node.serial) for node in nodes])
        yield
    tree_count.finish()
    for lease in memory.leases.open_leases:
        _audit_row(memory, lease)
        yield
    for bounded in memory.tree.bounded:
        _audit_readers(memory, bounded)
        yield
    for claim in claims:
        claim.take_the_rest()
        yield
        claim.finish()


def _batched(nodes: Iterator[Node], count: int) -> Iterator[list[Node]]:
    while batch := list(itertools.islice(nodes, count)):
        yield batch


class PoolClaims:
    """Who holds which page of a pool, counted from the holders."""

    def __init__(self, memory: Parts, group: int):
        self.group = group
        self._memory = memory
        self._pool = memory.pools[group]
        self._is_bounded = memory.groups[group].is_bounded
        self._counted: Int64 = np.full(self._pool.capacity + 1, NOBODY, np.int64)
        if self._is_bounded:
            self._counted[0] = owner.PADDING

    def take(self, parts: list[Int32], owners: list[int]) -> None:
        """The pages in parts[i] are held by owners[i]. Raises AuditError for a page that is held twice."""
        if not parts:
            return
        pages = np.concatenate(parts)
        by = np.repeat(np.array(owners, np.int64), [len(part) for part in parts])
        if self._is_bounded:  # holes are nobody's
            by, pages = by[pages != 0], pages[pages != 0]
        values, counts = np.unique(pages, return_counts=True)
        twice = values[(counts > 1) | (self._counted[values] != NOBODY)]
        if len(twice):
            page = int(twice[0])
            holders = [*self._counted[page : page + 1].tolist(), *by[pages == page].tolist()]
            first, second = [owner.describe(holder) for holder in holders if holder != NOBODY][:2]
            raise AuditError(f"group {self.group}: page {page} is held by both {first} and {second}")
        self._counted[pages] = by

    def take_the_rest(self) -> None:
        """All but the tree's."""
        memory, pool, group = self._memory, self._pool, self.group
        self.take([np.zeros(1, np.int32), pool.free_pages()], [owner.PADDING, owner.FREE])
        limbo = pool.limbo_pages()
        self.take(list(limbo.values()), [owner.limbo(fence) for fence in limbo])
        tails = [tail for _, tail in memory.tails]
        self.take([tail.pages[group] for tail in tails], [tail.owner for tail in tails])
        leases = memory.leases.open_leases
        private = [lease.pages(lease.shared, lease.allocated)[group] for lease in leases]
        self.take(private, [lease.owner for lease in leases])

    def finish(self) -> None:
        """Raises AuditError unless the ledger says the same."""
        pool, group = self._pool, self.group
        wrong = np.flatnonzero(self._counted != pool.owner)
        if len(wrong):
            page = int(wrong[0])
            found = "nobody" if self._counted[page] == NOBODY else owner.describe(int(self._counted[page]))
            history = "\n".join(f"  {move}" for move in pool.recorder.history(page))
            raise AuditError(
                f"group {group}: {len(wrong)} pages differ; page {page} is registered to "
                f"{owner.describe(int(pool.owner[page]))} but held by {found}\n{history}"
            )
        if pool.free_count + pool.limbo_count + pool.held_count != pool.capacity:
            raise AuditError(f"group {group}: free + limbo + held is not {pool.capacity}")


class TreeCount:
    """The tree's counters, counted again from its nodes."""

    def __init__(self, memory: Parts):
        self._tree = memory.tree
        self._operator_pins = Counter(pin.node.serial for pin in memory.pins)
        self._lease_pins = Counter(lease.node.serial for lease in memory.leases.open_leases)
        self._pages = self._held = self._retained = 0
        self._bounded_pages = {bounded.number: 0 for bounded in memory.tree.bounded}

    def add(self, node: Node) -> None:
        tree = self._tree
        holds = sum(node.pins) + sum(1 for child in node.children.values() if child.holds)
        if holds != node.holds:
            raise AuditError(f"{node!r}: counted {holds} holds")
        for number, (pool, part) in enumerate(zip(tree.pools, node.pages, strict=True)):
            if len(part) * pool.page_size != len(node.tokens):
                raise AuditError(f"{node!r}: {len(part)} pages for {len(node.tokens)} tokens")
            there = int(np.count_nonzero(part))
            if number in self._bounded_pages:
                self._bounded_pages[number] += there
            elif there != len(part):
                raise AuditError(f"{node!r}: group {number} has holes")
        self._pages += node.page_count
        self._held += node.page_count if node.holds else 0
        self._retained += node.page_count if node.level > 0 else 0
        for kind, name, counted in (
            (PinKind.OPERATOR, "operator's", self._operator_pins),
            (PinKind.LEASE, "lease", self._lease_pins),
        ):
            if node.pins[kind] != counted.pop(node.serial, 0):
                raise AuditError(f"{node!r}: {node.pins[kind]} {name} pins, counted others")
        if node.evictable and not node.queued:
            raise AuditError(f"{node!r} is evictable but not a candidate for eviction")

    def finish(self) -> None:
        tree = self._tree
        kept = (tree.page_count, tree.holds.page_count, tree.hints.page_count)
        counted = (self._pages, self._held, self._retained)
        if counted != kept:
            raise AuditError(f"tree counts {kept} pages in all, held and retained; recounted {counted}")
        for bounded in tree.bounded:
            counted = self._bounded_pages[bounded.number]
            if counted != bounded.page_count:
                raise AuditError(
                    f"group {bounded.number}: the tree counts {bounded.page_count} pages; recounted {counted}"
                )
        if self._lease_pins or self._operator_pins:
            strangers = sorted({*self._lease_pins, *self._operator_pins})
            raise AuditError(f"leases or operators pin nodes that are not in the tree: {strangers}")


def _audit_row(memory: Parts, lease: Lease) -> None:
    row, shared = lease.row, lease.shared
    if not 0 <= shared <= lease.committed <= lease.reserved <= lease.allocated:
        raise AuditError(f"lease {lease.serial}: {shared}, {lease.committed}, {lease.reserved}, {lease.allocated}")
    if lease.node.end != shared:
        raise AuditError(f"lease {lease.serial} shares {shared} tokens, its node ends at {lease.node.end}")
    for group, have in enumerate(lease.pages(0, shared)):
        path = memory.tree.path(lease.node)
        want = np.concatenate([node.pages[group] for node in path]) if path else have[:0]
        if memory.groups[group].is_bounded:
            slid = int(memory.leases.slid[group, row])
            if lease.pages(0, slid * memory.page_size)[group].any():
                raise AuditError(f"lease {lease.serial}: row {row} names pages of group {group} that were given back")
            want = np.where(have != 0, want, 0)
        if not np.array_equal(have, want):
            raise AuditError(f"lease {lease.serial}: row {row} does not name the tree's pages")


def _audit_readers(memory: Parts, bounded: BoundedPages) -> None:
    """Count again who reads each page of a bounded group."""
    rows = [lease.pages(0, lease.shared)[bounded.number] for lease in memory.leases.open_leases]
    pins = [bounded.needed_at(pin.node, pin.node.end) for pin in memory.pins]
    pages = np.concatenate([*rows, *pins, np.empty(0, np.int32)])
    counted = np.bincount(pages[pages != 0], minlength=len(bounded.readers))
    wrong = np.flatnonzero(counted != bounded.readers)
    if len(wrong):
        page = int(wrong[0])
        readers = bounded.readers[page]
        raise AuditError(f"group {bounded.number}: page {page} counts {readers} readers; recounted {counted[page]}")
    borrowed, kept = np.count_nonzero(counted), bounded.borrowed_count
    if borrowed != kept:
        raise AuditError(f"group {bounded.number}: {kept} pages count as borrowed; recounted {borrowed}")
