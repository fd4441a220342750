"""Proof of conservation on the host: who holds each page, who reads it, and what the device has as well."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from freehold.memory.ledger import owner
from freehold.memory.ledger.claims import Claims
from freehold.memory.ledger.errors import AuditError
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tiers.host import HostPages
from freehold.memory.tiers.tiers import Tiers
from freehold.prefix_keys import chain


def audit_tiers(tree: PrefixTree, tiers: Tiers) -> Iterator[None]:
    """In slices, as `audit` is. Raises AuditError."""
    _audit_keys(tree)
    yield
    for group, pages in enumerate(tiers.host.pages):
        _audit_pages(pages, tiers, group)
        _audit_mirrors(pages, tree, group)
        yield


def _audit_keys(tree: PrefixTree) -> None:
    for node in tree.nodes():
        if node.parent is not None and node.keys != chain(node.parent.keys[-1], node.tokens, tree.page_size):
            raise AuditError(f"{node!r}: its keys are not those of its tokens")


def _audit_pages(pages: HostPages, tiers: Tiers, group: int) -> None:
    claims = Claims(pages.pool, f"host, group {group}")
    claims.take([np.zeros(1, np.int32), pages.pool.free_pages()], [owner.PADDING, owner.FREE])
    claims.take([np.array([page for _, page in pages.entries()], np.int32)], [owner.ENTRY])
    transfers = list(tiers.transfers)
    claims.take([one.host[group] for one in transfers], [one.owner for one in transfers])
    claims.finish()
    read = np.concatenate([np.empty(0, np.int32), *(one.reads[group] for one in transfers)])
    counted = np.bincount(read, minlength=len(pages.readers))
    if (counted != pages.readers).any():
        page = int(np.argmax(counted != pages.readers))
        raise AuditError(f"host, group {group}: page {page} counts {pages.readers[page]} readers, not {counted[page]}")
    if pages.pool.owner[read].tolist() != [owner.ENTRY] * len(read):
        raise AuditError(f"host, group {group}: a transfer reads a page that is no entry")


def _audit_mirrors(pages: HostPages, tree: PrefixTree, group: int) -> None:
    on_device = {node.keys[column] for node in tree.nodes() for column in np.flatnonzero(node.pages[group]).tolist()}
    for key, _ in pages.entries():
        if pages.is_mirror(key) != (key in on_device):
            where = "is not" if pages.is_mirror(key) else "is"
            raise AuditError(f"host, group {group}: an entry counts wrongly: its page {where} on the device as well")
