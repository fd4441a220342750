"""Proof of conservation on the host: who holds each page, who reads it, and what the device has as well."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from freehold.memory.ledger import owner
from freehold.memory.ledger.claims import Claims, Holding, in_slices
from freehold.memory.ledger.errors import AuditError
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tiers.host import HostPages
from freehold.memory.tiers.tiers import Tiers
from freehold.prefix_keys import chain

KEYS_AT_ONCE = 512  # of a slice


def auditing_tiers(tree: PrefixTree, tiers: Tiers) -> Iterator[None]:
    """In slices, between which nothing may change. Raises AuditError."""
    yield from recounting_tiers(tiers)
    for group, pages in enumerate(tiers.host.pages):
        _check_readers(pages, tiers, group)
        yield
    yield from _checking_keys(tree, tiers)


def recounting_tiers(tiers: Tiers) -> Iterator[None]:
    """The same of pages alone, while tiers go on being used. Raises AuditError."""
    for group, pages in enumerate(tiers.host.pages):
        claims = Claims(pages.pool, f"host, group {group}")
        try:
            for holdings in in_slices(iter(list(_holdings(pages, tiers, group)))):
                claims.take(holdings)
                yield
            yield from claims.finish()
        finally:
            claims.close()


def _holdings(pages: HostPages, tiers: Tiers, group: int) -> Iterator[Holding]:
    yield pages.pool.free_pages(), owner.FREE
    yield pages.pages_of_entries(), owner.ENTRY
    for transfer in tiers.transfers:
        yield transfer.host[group], transfer.owner


def _check_readers(pages: HostPages, tiers: Tiers, group: int) -> None:
    read = np.concatenate([np.empty(0, np.int32), *(one.reads[group] for one in tiers.transfers)])
    counted = np.bincount(read, minlength=len(pages.readers))
    if (counted != pages.readers).any():
        page = int(np.argmax(counted != pages.readers))
        raise AuditError(f"host, group {group}: page {page} counts {pages.readers[page]} readers, not {counted[page]}")
    if pages.pool.owner[read].tolist() != [owner.ENTRY] * len(read):
        raise AuditError(f"host, group {group}: a transfer reads a page that is no entry")


def _checking_keys(tree: PrefixTree, tiers: Tiers) -> Iterator[None]:
    """Keys of nodes are those of their tokens, and the host knows which of its entries the device has as well."""
    mirrors, looked_at = [0] * len(tiers.host.pages), 0
    for node in tree.nodes():
        if node.parent is None:
            continue
        if node.keys != chain(node.parent.keys[-1], node.tokens, tree.page_size):
            raise AuditError(f"{node!r}: its keys are not those of its tokens")
        for group, pages in enumerate(tiers.host.pages if node.namespace.weights == tree.weights else []):
            for key in node.keys_at(node.pages[group].nonzero()[0]):
                if key in pages and not pages.is_mirror(key):
                    raise AuditError(f"host, group {group}: an entry counts wrongly: its page is on the device as well")
                mirrors[group] += key in pages
        looked_at += node.page_count
        if looked_at >= KEYS_AT_ONCE:
            looked_at = 0
            yield
    for group, (pages, count) in enumerate(zip(tiers.host.pages, mirrors, strict=True)):
        if pages.mirror_count != count:
            raise AuditError(f"host, group {group}: {pages.mirror_count} entries count as mirrors; recounted {count}")
