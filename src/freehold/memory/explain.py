"""Explanations: who holds a page, and why a prefix missed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from freehold.contract.arrays import Int32
from freehold.memory.ledger import owner
from freehold.memory.ledger.owner import OwnerKind
from freehold.memory.parts import Parts
from freehold.memory.prefix.history import Eviction
from freehold.memory.prefix.node import Match, Namespace, PinKind

NEIGHBOURS_MAX = 64  # continuations compared to find the nearest one
NAMESPACES_MAX = 16
SHOWN_TOKENS = 8


class NoSuchPage(ValueError):
    """The group has no page of that number."""


@dataclass(frozen=True)
class Miss:
    """Why a prefix was not reused beyond `cached` tokens of `wanted`.

    `reason` is one of: hit (no more can be reused), too_short (too few tokens to reuse any), scored (log-probabilities
    of the rest must be computed), disabled, incomplete (more is cached, but pages of a bounded group needed to resume
    are gone), never_seen, different (the nearest cached sequence agrees for `common` tokens, then has `theirs` where
    this one has `ours`), evicted, namespace (a longer prefix is cached in another one), weights or adapter (it was
    computed with other ones).
    """

    wanted: int
    cached: int
    reason: str
    common: int
    ours: list[int]
    theirs: list[int]
    eviction: Eviction | None = None
    more_pages: int = 0  # cached beyond `cached`, but without the pages a bounded group needs

    def __str__(self) -> str:
        text = f"{self.cached} of {self.wanted} tokens cached"
        if self.reason == "incomplete":
            return f"{text}; {self.more_pages} more pages are cached, but their window or state is gone"
        if self.reason == "different":
            text += f"; after {self.common} tokens the nearest cached one has {self.theirs}, this one {self.ours}"
        elif self.eviction is not None:
            text += f"; the next {self.eviction.page_count} pages were {self.eviction}"
        else:
            text += f"; {_REASONS[self.reason]}"
        return text


_REASONS = {
    "hit": "the rest is less than one page, or the last token, which is always computed",
    "too_short": "no whole page comes before the last token, which is always computed",
    "scored": "log-probabilities or an embedding of the rest were asked for, so it is computed",
    "disabled": "the prefix cache is switched off",
    "never_seen": "no sequence that continues like this was computed, or its eviction is no longer recorded",
    "namespace": "a longer prefix is cached in another namespace (cache_salt)",
    "weights": "a longer prefix is cached for other weights",
    "adapter": "a longer prefix is cached for another adapter",
}


def explain_miss(memory: Parts, match: Match, tokens: Int32, limit: int | None = None) -> Miss:
    """Explain why no more of `tokens` [n] than `match` is cached; at most `limit` of them would be used. Changes
    nothing."""
    size, at = memory.page_size, match.length
    wanted = len(tokens)

    def miss(reason: str, common: int = at, theirs: Int32 | None = None, eviction: Eviction | None = None) -> Miss:
        ours: list[int] = tokens[common : common + SHOWN_TOKENS].tolist()
        shown: list[int] = [] if theirs is None else theirs[:SHOWN_TOKENS].tolist()
        return Miss(wanted, at, reason, common, ours, shown, eviction)

    if not memory.shape.prefix_cache:
        return miss("disabled")
    if at + size > wanted - 1:
        return miss("hit" if at else "too_short")
    if limit is not None and at + size > limit:
        return miss("scored")
    if match.known > at:
        more = (match.known - at) // size
        return replace(miss("incomplete", common=match.known), more_pages=more)
    eviction = _eviction_after(memory, match, tokens)
    if eviction is not None:
        return miss("evicted", eviction=eviction)
    for namespace in itertools.islice(memory.tree.roots, NAMESPACES_MAX):
        if namespace != match.namespace and memory.tree.match(namespace, tokens, wanted - 1).length > at:
            return miss(_difference(namespace, match.namespace))
    common, theirs = _nearest(match, tokens)
    return miss("never_seen") if theirs is None else miss("different", common, theirs)


def _difference(theirs: Namespace, ours: Namespace) -> str:
    """Return why one of two namespaces does not find what is in the other."""
    if theirs.salt != ours.salt:
        return "namespace"
    return "weights" if theirs.weights != ours.weights else "adapter"


def _eviction_after(memory: Parts, match: Match, tokens: Int32) -> Eviction | None:
    node, at = match.node, match.length
    if node is not None and node.end != at:
        return None
    place = node.place if node is not None else match.namespace
    return memory.tree.history.find(place, tokens[at : at + memory.page_size].tobytes())


def _nearest(match: Match, tokens: Int32) -> tuple[int, Int32 | None]:
    """Return how many tokens the most similar cached sequence shares, and its continuation."""
    node, at = match.node, match.length
    if node is None:
        return at, None
    if node.end > at:
        candidates = [node.tokens[at - node.start :]]
    else:
        candidates = [child.tokens for child in itertools.islice(node.children.values(), NEIGHBOURS_MAX)]
    best, theirs = 0, None
    for candidate in candidates:
        count = min(len(candidate), len(tokens) - at)
        differ = candidate[:count] != tokens[at : at + count]
        same = int(differ.argmax()) if differ.any() else count
        if theirs is None or same > best:
            best, theirs = same, candidate[same:]
    return at + best, theirs if best or at else None


def explain(memory: Parts, page: int, group: int = 0) -> str:
    """Explain who holds a page of a group, since which step, and why it can't be evicted. Raise NoSuchPage."""
    if not 0 <= group < len(memory.pools):
        raise NoSuchPage(f"group must be 0 .. {len(memory.pools) - 1}, not {group}")
    pool = memory.pools[group]
    if not 0 <= page <= pool.capacity:
        raise NoSuchPage(f"page must be 0 .. {pool.capacity}, not {page}")
    by = int(pool.owner[page])
    text = f"page {page}: {owner.describe(by)}, since step {int(pool.since[page])}"
    kind, serial = owner.kind_of(by), owner.id_of(by)
    if kind is OwnerKind.LEASE:
        text += _explain_lease(memory, page, group, serial)
    elif kind is OwnerKind.TAIL:
        tail = memory.tails.by_serial(serial)
        text += f"; positions {tail.start}..{tail.end - 1} of parked session '{tail.name}'; given up under pressure"
    elif kind is OwnerKind.TRANSFER:
        text += _explain_transfer(memory, serial)
    elif kind is OwnerKind.NODE:
        text += _explain_node(memory, page, group, serial)
    history = "\n".join(f"  {move}" for move in pool.recorder.history(page))
    return f"{text}\n{history}" if history else text


def _explain_lease(memory: Parts, page: int, group: int, serial: int) -> str:
    lease = next(lease for lease in memory.leases.open_leases if lease.serial == serial)
    table = memory.leases.page_tables.tables[group][lease.row]
    shared = lease.shared // memory.page_size
    at = (shared + int(np.argmax(table[shared:] == page))) * memory.page_size
    return (
        f"; row {lease.row}, positions {at}..{at + memory.page_size - 1}, {lease.committed} tokens committed; "
        "private to a running request"
    )


def _explain_transfer(memory: Parts, number: int) -> str:
    assert memory.tiers is not None
    for transfer in memory.tiers.transfers:
        if transfer.order.number == number:
            seconds = memory.tiers.transfers.now - transfer.begun
            return f"; a {transfer.order.kind} of {sum(transfer.order.page_counts)} pages, {seconds:.3f} s old"
    return "; evicted, and about to be copied to the host"


def _explain_node(memory: Parts, page: int, group: int, serial: int) -> str:
    node = memory.tree.node(serial)
    at = node.start + int(np.argmax(node.pages[group] == page)) * memory.page_size
    text = f"; positions {at}..{at + memory.page_size - 1} of a prefix{_scope(node.namespace)}"
    if node.level:
        text += f"; kept by a hint of priority {node.level}" if node.level > 0 else "; evicted first, as a hint asked"
    for bounded in memory.tree.bounded:
        if bounded.number == group:
            readers = int(bounded.readers[page])
            return f"{text}; read by {readers}" if readers else f"{text}; evictable: no reader"
    pins = [f"{count} {PinKind(kind).name.lower()}" for kind, count in enumerate(node.pins) if count]
    if pins:
        return f"{text}; pinned by {', '.join(pins)}"
    if node.holds:
        return f"{text}; a longer prefix in use continues it"
    return f"{text}; evictable" if node.evictable else f"{text}; evictable after its {len(node.children)} continuations"


def _scope(namespace: Namespace) -> str:
    salt = f" in namespace '{namespace.salt}'" if namespace.salt else ""
    adapter = f", adapter {namespace.adapter[:12]}" if namespace.adapter else ""
    return f"{salt}{adapter}, weights {namespace.weights}" if namespace.weights else salt + adapter
