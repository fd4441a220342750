"""Conservation audit: recount every page from its holders and compare with the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator

import numpy as np

from freehold.memory.counts import PageCounts, count_pages
from freehold.memory.lease import Lease
from freehold.memory.ledger import owner
from freehold.memory.ledger.claims import Claims, Holding, in_slices
from freehold.memory.ledger.errors import AuditError
from freehold.memory.ledger.owner import OwnerKind
from freehold.memory.parts import Parts
from freehold.memory.prefix.audit import TreeCount, check_node
from freehold.memory.prefix.bounded import BoundedPages
from freehold.memory.prefix.node import Node, PinKind
from freehold.memory.tiers.audit import auditing_tiers, recounting_tiers

NODES_AT_ONCE = 32  # in a slice
COLUMNS_AT_ONCE = 2048  # of these nodes together, approximately


def audit(memory: Parts) -> None:
    """Raise AuditError unless tree, leases, limbo and free lists add up to exactly the ledger."""
    for _ in auditing(memory):
        pass


def auditing(memory: Parts) -> Iterator[None]:
    """Audit in slices of about a millisecond. Memory must not change between them; if it does, start over. Raise
    AuditError."""
    count = TreeCount(memory.tree, _pins(memory))
    claims = yield from _recounting(memory, count.add)
    yield from count.finish()
    _check_rows(memory)
    for bounded in memory.tree.bounded:
        _check_readers(memory, bounded)
        yield
    for group, claim in enumerate(claims):
        _check_counts(memory, claim, group)
    if memory.tiers is not None:
        yield from auditing_tiers(memory.tree, memory.tiers)


def recounting(memory: Parts) -> Iterator[None]:
    """Audit while memory is in use. What changes between slices is skipped: moving pages, which are checked when they
    move, and totals. Raise AuditError."""
    yield from _recounting(memory, lambda node: None)
    if memory.tiers is not None:
        yield from recounting_tiers(memory.tiers)


def _recounting(memory: Parts, count: Callable[[Node], None]) -> Generator[None, None, list[Claims]]:
    """Check every node, row and page by itself. Return the claims. `count` gets every node."""
    claims: list[Claims] = []
    try:
        for number, pool in enumerate(memory.pools):
            claims.append(Claims(pool, f"group {number}"))
            yield
        for nodes in _in_batches(memory.tree.nodes()):
            for node in nodes:
                if memory.tree.has(node):
                    check_node(memory.tree, node)
                    count(node)
            for group, claim in enumerate(claims):
                claim.take([(node.pages[group], owner.node(node.serial)) for node in nodes])
            yield
        for lease in memory.leases.open_leases:
            if lease.is_open:
                _check_lease(memory, lease)
            yield
        for group, claim in enumerate(claims):
            for holdings in in_slices(iter(list(_others(memory, claim, group)))):
                claim.take(holdings)
                yield
            yield from claim.finish()
    finally:
        for claim in claims:
            claim.close()
    return claims


def _in_batches(nodes: Iterator[Node]) -> Iterator[list[Node]]:
    batch: list[Node] = []
    columns = 0
    for node in nodes:
        batch.append(node)
        columns += node.page_count
        if len(batch) == NODES_AT_ONCE or columns >= COLUMNS_AT_ONCE:
            yield batch
            batch, columns = [], 0
    if batch:
        yield batch


def _pins(memory: Parts) -> Counter[tuple[int, PinKind]]:
    """Count the pins of each kind by the serial of their node, from the holders."""
    pins = Counter((lease.node.serial, PinKind.LEASE) for lease in memory.leases.open_leases)
    pins.update((pin.node.serial, PinKind.OPERATOR) for pin in memory.pins)
    pins.update((hold.node.serial, hold.kind) for hold in ([] if memory.tiers is None else memory.tiers.holds))
    return pins


def _others(memory: Parts, claims: Claims, group: int) -> Iterator[Holding]:
    """Yield all holders of a group's device pages except the tree."""
    pool = claims.pool
    yield pool.free_pages(), owner.FREE
    for fence, pages in pool.limbo_pages().items():
        yield pages, owner.limbo(fence)
    for _, tail in memory.tails:
        yield tail.pages[group], tail.owner
    for lease in memory.leases.open_leases:
        yield lease.pages(lease.shared, lease.allocated)[group].copy(), lease.owner
    if memory.tiers is not None:
        for transfer in memory.tiers.transfers:
            yield transfer.device[group], transfer.owner
        backup = memory.tiers.backup
        yield backup.rescued_pages(group), backup.rescue_owner


def _check_lease(memory: Parts, lease: Lease) -> None:
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


def _check_rows(memory: Parts) -> None:
    """Check that every row is free, in limbo, or leased."""
    leases = memory.leases
    leased = [lease.row for lease in leases.open_leases]
    rows = [*leases.free_rows, *(row for _, row in leases.limbo_rows), *leased]
    if sorted(rows) != list(range(leases.row_count)):
        counts = Counter(rows)
        wrong = next(row for row in range(leases.row_count) if counts[row] != 1)
        raise AuditError(f"row {wrong} is {counts[wrong]} times free, in limbo or leased")
    owners = {lease.row: lease.owner for lease in leases.open_leases}
    for row, by in enumerate(leases.owner.tolist()):
        if by != owners.get(row, 0):
            raise AuditError(f"row {row} is registered to {owner.describe(by)}, leased to {owners.get(row)}")


def _check_readers(memory: Parts, bounded: BoundedPages) -> None:
    """Recount the readers of each page of a bounded group."""
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


def _check_counts(memory: Parts, claims: Claims, group: int) -> None:
    """Check that the counts by owner, used by admission and metrics, match the holders."""
    told, counts = count_pages(memory, group), claims.counts
    counted = PageCounts(
        capacity=claims.pool.capacity,
        free=counts[OwnerKind.FREE],
        limbo=counts[OwnerKind.LIMBO],
        lease=counts[OwnerKind.LEASE],
        tail=counts[OwnerKind.TAIL],
        pinned=told.pinned,  # counted by the tree
        tree=counts[OwnerKind.NODE] - told.pinned,
        transfer=counts[OwnerKind.TRANSFER],
    )
    if counted != told:
        raise AuditError(f"group {group}: counted along the way: {told}; recounted: {counted}")
