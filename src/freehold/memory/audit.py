"""Proof of conservation: recount every page from its holders and compare with the ledger."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from freehold.arrays import Int64
from freehold.memory import owner
from freehold.memory.errors import AuditError
from freehold.memory.node import PinKind
from freehold.memory.pool import PagePool

if TYPE_CHECKING:
    from freehold.memory.memory import Memory


@dataclass(frozen=True)
class PageCounts:
    """Pages of one pool by owner. free + limbo + lease + tail + pinned + tree == capacity."""

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


def count_pages(memory: Memory, group: int = 0) -> PageCounts:
    """Pages by owner, from counters kept along the way: cheap, made for metrics."""
    pool, tree = memory.pools[group], memory.tree
    return PageCounts(
        capacity=pool.capacity,
        free=pool.free_count,
        limbo=pool.limbo_count,
        lease=pool.held_count - tree.page_count - memory.tails.page_count,
        tail=memory.tails.page_count,
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
    for _, tail in memory.tails:
        claim(tail.pages[group], tail.owner)
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
    pages = held = retained = 0
    pins = Counter(pin.node.serial for pin in memory.pins)
    for node in tree.nodes():
        holds = sum(node.pins) + sum(1 for child in node.children.values() if child.holds)
        if holds != node.holds:
            raise AuditError(f"{node!r}: counted {holds} holds")
        for pool, part in zip(tree.pools, node.pages, strict=True):
            if len(part) * pool.page_size != len(node.tokens):
                raise AuditError(f"{node!r}: {len(part)} pages for {len(node.tokens)} tokens")
        pages += len(node.pages[0])
        held += len(node.pages[0]) if node.holds else 0
        retained += len(node.pages[0]) if node.level > 0 else 0
        if node.pins[PinKind.OPERATOR] != pins[node.serial]:
            raise AuditError(f"{node!r}: {node.pins[PinKind.OPERATOR]} operator's pins, counted {pins[node.serial]}")
        if node.evictable and not node.queued:
            raise AuditError(f"{node!r} is evictable but not a candidate for eviction")
    counted = (tree.page_count, tree.held_page_count, tree.hints.page_count)
    if (pages, held, retained) != counted:
        raise AuditError(f"tree counts {counted} pages in all, held and retained; recounted {pages, held, retained}")


def _audit_rows(memory: Memory) -> None:
    table = memory.leases
    pins: dict[int, int] = {}
    for lease in table.open_leases:
        row, shared = lease.row, lease.shared
        if not 0 <= shared <= lease.committed <= lease.reserved <= lease.allocated:
            raise AuditError(f"lease {lease.serial}: {shared}, {lease.committed}, {lease.reserved}, {lease.allocated}")
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
