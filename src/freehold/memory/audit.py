"""Proof of conservation: recount every page from its holders and compare with the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from freehold.arrays import Int64
from freehold.memory import owner
from freehold.memory.errors import AuditError
from freehold.memory.owner import OwnerKind
from freehold.memory.pool import PagePool
from freehold.memory.tree import PinKind

if TYPE_CHECKING:
    from freehold.memory.memory import Memory


@dataclass(frozen=True)
class PageCounts:
    """Pages of one pool by owner. free + limbo + lease + pinned + tree == capacity."""

    capacity: int
    free: int
    limbo: int
    lease: int
    pinned: int  # owned by the tree, on a path that somebody uses
    tree: int  # owned by the tree, evictable

    @property
    def held(self) -> int:
        return self.capacity - self.free

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("capacity", "free", "limbo", "lease", "pinned", "tree")}


def count_pages(memory: Memory, group: int = 0) -> PageCounts:
    """Pages by owner, from counters kept along the way: cheap, made for metrics."""
    pool, tree = memory.pools[group], memory.tree
    return PageCounts(
        capacity=pool.capacity,
        free=pool.free_count,
        limbo=pool.limbo_count,
        lease=pool.held_count - tree.page_count,
        pinned=tree.held_page_count,
        tree=tree.evictable_page_count,
    )


def audit(memory: Memory) -> None:
    """Raise AuditError unless tree, leases, limbo and free lists add up to exactly the ledger."""
    _audit_tree(memory)
    _audit_rows(memory)
    for group, pool in enumerate(memory.pools):
        _audit_pool(memory, group, pool)


def _audit_pool(memory: Memory, group: int, pool: PagePool) -> None:
    counted: Int64 = np.full(pool.capacity + 1, -1, np.int64)

    def claim(pages: np.ndarray, by: int) -> None:
        taken = counted[pages] != -1
        if taken.any() or len(np.unique(pages)) != len(pages):
            at = int(pages[int(taken.argmax())])
            raise AuditError(
                f"group {group}: page {at} is held by both {owner.describe(int(counted[at]))} and {owner.describe(by)}"
            )
        counted[pages] = by

    claim(np.zeros(1, np.int64), owner.PADDING)
    claim(pool.free_pages(), owner.FREE)
    for fence, pages in pool.limbo_pages().items():
        claim(pages, owner.limbo(fence))
    for node in memory.tree.nodes():
        claim(node.pages[group], owner.node(node.serial))
    for lease in memory.leases.open_leases:
        claim(lease.pages(lease.shared, lease.allocated)[group], lease.owner)
    wrong = np.flatnonzero(counted != pool.owner)
    if len(wrong):
        page = int(wrong[0])
        found = "nobody" if counted[page] == -1 else owner.describe(int(counted[page]))
        history = "\n".join(f"  {move}" for move in pool.recorder.history(page))
        raise AuditError(
            f"group {group}: {len(wrong)} pages differ; page {page} is registered to "
            f"{owner.describe(int(pool.owner[page]))} but held by {found}\n{history}"
        )
    if pool.free_count + pool.limbo_count + pool.held_count != pool.capacity:
        raise AuditError(f"group {group}: free + limbo + held is not {pool.capacity}")


def _audit_tree(memory: Memory) -> None:
    tree = memory.tree
    pages = held = 0
    for node in tree.nodes():
        holds = sum(node.pins) + sum(1 for child in node.children.values() if child.holds)
        if holds != node.holds:
            raise AuditError(f"{node!r}: counted {holds} holds")
        for pool, part in zip(tree.pools, node.pages, strict=True):
            if len(part) * pool.page_size != len(node.tokens):
                raise AuditError(f"{node!r}: {len(part)} pages for {len(node.tokens)} tokens")
        pages += len(node.pages[0])
        held += len(node.pages[0]) if node.holds else 0
        if node.evictable and not node.queued:
            raise AuditError(f"{node!r} is evictable but not a candidate for eviction")
    if (pages, held) != (tree.page_count, tree.held_page_count):
        raise AuditError(f"tree counts {tree.page_count}/{tree.held_page_count}, recounted {pages}/{held}")


def _audit_rows(memory: Memory) -> None:
    table = memory.leases
    pins: dict[int, int] = {}
    for lease in table.open_leases:
        row, shared = lease.row, lease.shared
        if not 0 <= shared <= lease.committed <= lease.allocated:
            raise AuditError(f"lease {lease.serial}: {shared}, {lease.committed}, {lease.allocated}")
        if lease.node.end != shared:
            raise AuditError(f"lease {lease.serial} shares {shared} tokens, its node ends at {lease.node.end}")
        for group, have in enumerate(lease.pages(0, shared)):
            path = memory.tree.path(lease.node)
            want = np.concatenate([node.pages[group] for node in path]) if path else have[:0]
            if not np.array_equal(have, want):
                raise AuditError(f"lease {lease.serial}: row {row} does not name the tree's pages")
        pins[lease.node.serial] = pins.get(lease.node.serial, 0) + 1
    for node in memory.tree.nodes():
        if node.pins[PinKind.LEASE] != pins.pop(node.serial, 0):
            raise AuditError(f"{node!r}: {node.pins[PinKind.LEASE]} lease pins, other leases counted")
    if pins:
        raise AuditError(f"leases pin nodes that are not in the tree: {sorted(pins)}")


def explain(memory: Memory, page: int, group: int = 0) -> str:
    """Who holds a page, since which step, and why it can't be evicted. ValueError if out of range."""
    pool = memory.pools[group]
    if not 0 <= page <= pool.capacity:
        raise ValueError(f"page must be 0 .. {pool.capacity}, not {page}")
    by = int(pool.owner[page])
    text = f"page {page}: {owner.describe(by)}, since step {int(pool.since[page])}"
    kind, serial = owner.kind_of(by), owner.id_of(by)
    if kind is OwnerKind.LEASE:
        text += _explain_lease(memory, page, group, serial)
    elif kind is OwnerKind.NODE:
        text += _explain_node(memory, page, group, serial)
    history = "\n".join(f"  {move}" for move in pool.recorder.history(page))
    return f"{text}\n{history}" if history else text


def _explain_lease(memory: Memory, page: int, group: int, serial: int) -> str:
    lease = next(lease for lease in memory.leases.open_leases if lease.serial == serial)
    table = memory.leases.page_tables[group][lease.row]
    shared = lease.shared // memory.page_size
    at = (shared + int(np.argmax(table[shared:] == page))) * memory.page_size
    return (
        f"; row {lease.row}, positions {at}..{at + memory.page_size - 1}, {lease.committed} tokens committed; "
        "private to a running request"
    )


def _explain_node(memory: Memory, page: int, group: int, serial: int) -> str:
    node = next(node for node in memory.tree.nodes() if node.serial == serial)
    at = node.start + int(np.argmax(node.pages[group] == page)) * memory.page_size
    text = f"; positions {at}..{at + memory.page_size - 1} of a prefix in namespace '{node.namespace}'"
    pins = [f"{count} {PinKind(kind).name.lower()}" for kind, count in enumerate(node.pins) if count]
    if pins:
        return f"{text}; pinned by {', '.join(pins)}"
    if node.holds:
        return f"{text}; a longer prefix in use continues it"
    return f"{text}; evictable" if node.evictable else f"{text}; evictable after its {len(node.children)} continuations"
