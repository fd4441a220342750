"""Proof of conservation: recount every page from its holders and compare with the ledger."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from freehold.memory.lease import Lease
from freehold.memory.ledger import owner
from freehold.memory.ledger.claims import Claims
from freehold.memory.ledger.errors import AuditError
from freehold.memory.parts import Parts
from freehold.memory.prefix.bounded import BoundedPages
from freehold.memory.prefix.node import Node, PinKind
from freehold.memory.tiers.audit import audit_tiers

NODES_AT_ONCE = 128  # of an audit's slice


@dataclass(frozen=True)
class PageCounts:
    """Pages of one pool by owner; together they are `capacity`. Of a bounded group, pinned pages are those borrowed."""

    capacity: int
    free: int
    limbo: int
    lease: int
    tail: int  # partial last pages of parked sessions
    pinned: int  # owned by the tree, on a path that somebody uses
    tree: int  # owned by the tree, evictable
    transfer: int = 0  # on their way from or to another tier

    @property
    def held(self) -> int:
        return self.capacity - self.free

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def count_pages(memory: Parts, group: int = 0) -> PageCounts:
    """Pages by owner, from counters kept along the way: cheap, made for metrics."""
    pool, tree = memory.pools[group], memory.tree
    in_tree, pinned = tree.page_count, tree.holds.page_count
    for bounded in tree.bounded:
        if bounded.number == group:
            in_tree, pinned = bounded.page_count, bounded.borrowed_count
    moving = 0 if memory.tiers is None else memory.tiers.device_pages(group)
    return PageCounts(
        capacity=pool.capacity,
        free=pool.free_count,
        limbo=pool.limbo_count,
        lease=pool.held_count - in_tree - memory.tails.page_count - moving,
        tail=memory.tails.page_count,
        pinned=pinned,
        tree=in_tree - pinned,
        transfer=moving,
    )


def audit(memory: Parts) -> None:
    """Raise AuditError unless tree, leases, limbo and free lists add up to exactly the ledger."""
    for _ in auditing(memory):
        pass


def auditing(memory: Parts) -> Iterator[None]:
    """The audit in slices of about a millisecond. Between them nothing in memory may change; if it does, begin
    anew. Raises AuditError."""
    tree_count = TreeCount(memory)
    claims = [
        Claims(pool, f"group {number}", group.is_bounded)
        for number, (pool, group) in enumerate(zip(memory.pools, memory.groups, strict=True))
    ]
    for nodes in _batched(memory.tree.nodes(), NODES_AT_ONCE):
        for node in nodes:
            tree_count.add(node)
        for group, claim in enumerate(claims):
            pages = [node.pages[group] for node in nodes]
            claim.take(pages, [owner.node(node.serial) for node in nodes])
        yield
    tree_count.finish()
    for lease in memory.leases.open_leases:
        _audit_row(memory, lease)
        yield
    for bounded in memory.tree.bounded:
        _audit_readers(memory, bounded)
        yield
    for group, claim in enumerate(claims):
        _take_the_rest(memory, claim, group)
        yield
        claim.finish()
    if memory.tiers is not None:
        yield from audit_tiers(memory.tree, memory.tiers)


def _batched(nodes: Iterator[Node], count: int) -> Iterator[list[Node]]:
    while batch := list(itertools.islice(nodes, count)):
        yield batch


def _take_the_rest(memory: Parts, claims: Claims, group: int) -> None:
    """All device pages of a group but the tree's."""
    pool = claims.pool
    claims.take([np.zeros(1, np.int32), pool.free_pages()], [owner.PADDING, owner.FREE])
    limbo = pool.limbo_pages()
    claims.take(list(limbo.values()), [owner.limbo(fence) for fence in limbo])
    tails = [tail for _, tail in memory.tails]
    claims.take([tail.pages[group] for tail in tails], [tail.owner for tail in tails])
    leases = memory.leases.open_leases
    private = [lease.pages(lease.shared, lease.allocated)[group] for lease in leases]
    claims.take(private, [lease.owner for lease in leases])
    if memory.tiers is not None:
        transfers = list(memory.tiers.transfers)
        claims.take([one.device[group] for one in transfers], [one.owner for one in transfers])
        backup = memory.tiers.backup
        claims.take([backup.rescued_pages(group)], [backup.rescue_owner])


class TreeCount:
    """The tree's counters, counted again from its nodes."""

    def __init__(self, memory: Parts):
        self._tree = memory.tree
        self._operator_pins = Counter(pin.node.serial for pin in memory.pins)
        self._lease_pins = Counter(lease.node.serial for lease in memory.leases.open_leases)
        holds = [] if memory.tiers is None else memory.tiers.holds
        self._transfer_pins = Counter((hold.node.serial, hold.kind) for hold in holds)
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
        pins = [0] * len(PinKind)
        pins[PinKind.OPERATOR] = self._operator_pins.pop(node.serial, 0)
        pins[PinKind.LEASE] = self._lease_pins.pop(node.serial, 0)
        for kind in (PinKind.BACKUP, PinKind.LOAD):
            pins[kind] = self._transfer_pins.pop((node.serial, kind), 0)
        for kind, counted in zip(PinKind, pins, strict=True):
            if node.pins[kind] != counted:
                raise AuditError(f"{node!r}: {node.pins[kind]} {kind.name.lower()} pins; counted {counted}")
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
        strangers = {*self._lease_pins, *self._operator_pins, *(serial for serial, _ in self._transfer_pins)}
        if strangers:
            raise AuditError(f"nodes that are not in the tree are pinned: {sorted(strangers)}")


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
    at = memory.tree.bounded.index(bounded)
    holds = [] if memory.tiers is None else [hold.borrowed[at] for hold in memory.tiers.holds]
    pages = np.concatenate([*rows, *pins, *holds, np.empty(0, np.int32)])
    counted = np.bincount(pages[pages != 0], minlength=len(bounded.readers))
    wrong = np.flatnonzero(counted != bounded.readers)
    if len(wrong):
        page = int(wrong[0])
        readers = bounded.readers[page]
        raise AuditError(f"group {bounded.number}: page {page} counts {readers} readers; recounted {counted[page]}")
    borrowed, kept = np.count_nonzero(counted), bounded.borrowed_count
    if borrowed != kept:
        raise AuditError(f"group {bounded.number}: {kept} pages count as borrowed; recounted {borrowed}")
