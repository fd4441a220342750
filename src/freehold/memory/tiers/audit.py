"""Conservation audit of the host: holders and readers of each page, and mirrors of device pages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from freehold.contract.prefix_keys import chain
from freehold.memory.ledger import owner
from freehold.memory.ledger.claims import Claims, Holding, in_slices
from freehold.memory.ledger.errors import AuditError
from freehold.memory.prefix.node import Node
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tiers.host import HostPages
from freehold.memory.tiers.tiers import Tiers

KEYS_AT_ONCE = 256  # in a slice, approximately
KEYS_OF_A_NODE = 8  # cost per node, in keys


def auditing_tiers(tree: PrefixTree, tiers: Tiers) -> Iterator[None]:
    """Audit in slices, between which nothing may change. Raise AuditError."""
    yield from recounting_tiers(tiers)
    for group, pages in enumerate(tiers.host.pages):
        _check_readers(pages, tiers, group)
        yield
    yield from _checking_keys(tree, tiers)


def recounting_tiers(tiers: Tiers) -> Iterator[None]:
    """Audit pages alone, while the tiers are in use. Raise AuditError."""
    for group, pages in enumerate(tiers.host.pages):
        claims = Claims(pages.pool, f"host, group {group}")
        try:
            for part in pages.pages_of_entries():
                claims.take([(part, owner.ENTRY)])
                yield
            for holdings in in_slices(iter(list(_others(pages, tiers, group)))):
                claims.take(holdings)
                yield
            yield from claims.finish()
        finally:
            claims.close()


def _others(pages: HostPages, tiers: Tiers, group: int) -> Iterator[Holding]:
    """Yield all holders of a group's host pages except entries."""
    yield pages.pool.free_pages(), owner.FREE
    for transfer in tiers.transfers:
        yield transfer.host[group], transfer.owner


def _check_readers(pages: HostPages, tiers: Tiers, group: int) -> None:
    read = np.concatenate([np.empty(0, np.int32), *(one.reads[group] for one in tiers.transfers)])
    if len(pages) != len(pages.pool.pages_of(owner.ENTRY)):
        raise AuditError(f"host, group {group}: {len(pages)} keys for entries, but another number of pages")
    counted = np.bincount(read, minlength=len(pages.readers))
    if (counted != pages.readers).any():
        page = int(np.argmax(counted != pages.readers))
        raise AuditError(f"host, group {group}: page {page} counts {pages.readers[page]} readers, not {counted[page]}")
    if pages.pool.owner[read].tolist() != [owner.ENTRY] * len(read):
        raise AuditError(f"host, group {group}: a transfer reads a page that is not an entry")


def _checking_keys(tree: PrefixTree, tiers: Tiers) -> Iterator[None]:
    """Check that keys of nodes match their tokens, and that the host knows which entries the device has as well."""
    mirrors, looked_at = [0] * len(tiers.host.pages), 0
    for node in tree.nodes():
        if node.parent is None:
            continue
        if len(node.keys) != node.page_count:
            raise AuditError(f"{node!r}: {len(node.keys)} keys")
        for first in range(0, node.page_count, KEYS_AT_ONCE):
            end = min(first + KEYS_AT_ONCE, node.page_count)
            _check_keys(tree, node, first, end)
            if node.namespace.weights == tree.weights:
                for group, pages in enumerate(tiers.host.pages):
                    mirrors[group] += _mirror_count(pages, node, group, first, end)
            looked_at += end - first + KEYS_OF_A_NODE
            if looked_at >= KEYS_AT_ONCE:
                looked_at = 0
                yield
    for group, (pages, count) in enumerate(zip(tiers.host.pages, mirrors, strict=True)):
        if pages.mirror_count != count:
            raise AuditError(f"host, group {group}: {pages.mirror_count} entries count as mirrors; recounted {count}")


def _check_keys(tree: PrefixTree, node: Node, first: int, end: int) -> None:
    assert node.parent is not None
    before = node.keys[first - 1] if first else node.parent.keys[-1]
    tokens = node.tokens[first * tree.page_size : end * tree.page_size]
    if node.keys[first:end] != chain(before, tokens, tree.page_size):
        raise AuditError(f"{node!r}: its keys are not those of its tokens")


def _mirror_count(pages: HostPages, node: Node, group: int, first: int, end: int) -> int:
    """Return the number of entries of device pages in some columns of a node."""
    keys = node.keys_at(first + node.pages[group][first:end].nonzero()[0])
    count = int(np.count_nonzero(pages.has(keys)))
    if count != sum(map(pages.is_mirror, keys)):
        raise AuditError(f"host, group {group}: an entry is not a mirror, though its page is on the device")
    return count
