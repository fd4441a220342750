"""All KV memory of one engine: pools, prefix tree, leases and the epochs that fence them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from freehold.arrays import Bool, Int32, Int64
from freehold.memory.audit import PageCounts, audit, auditing, count_pages
from freehold.memory.explain import Miss, explain, explain_miss
from freehold.memory.lease import Lease
from freehold.memory.lease_table import LeaseTable
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.ledger.pool import PagePool
from freehold.memory.prefix.node import Match, Namespace, Node
from freehold.memory.prefix.pins import PinnedPrefix, PinTable
from freehold.memory.prefix.retention import Retention
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.shape import MemoryShape
from freehold.memory.tails import Tail, TailTable


class Memory:
    """Moves ownership; called by the scheduler thread alone."""

    def __init__(self, shape: MemoryShape):
        self.shape = shape
        self.page_size = shape.page_size
        self.epochs = Epochs()
        self.groups = shape.groups
        self.pools = [PagePool(count, shape.page_size, self.epochs) for count in shape.page_counts]
        quota = None if shape.tenant_quota is None else shape.pages(shape.tenant_quota)
        retained = shape.pages(shape.retained_share)
        self.tree = PrefixTree(self.pools, self.epochs, shape.eviction_policy, quota, retained, shape.groups)
        self.tails = TailTable(self.pools)
        self.pins = PinTable(self.tree, shape.pages(shape.pinned_share))
        self.leases = LeaseTable(
            self.pools, shape.groups, self.tree, self.tails, self.epochs, shape.row_count, shape.token_limit,
            shape.checkpoint_interval,
        )  # fmt: skip

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence can have at most."""
        if not self.shape.has_full_groups:
            return self.shape.token_limit
        return self.shape.page_count * self.page_size

    def match(self, namespace: str, tokens: Int32, limit: int | None = None) -> Match:
        """The longest reusable prefix of at most `limit` tokens, leaving at least the last one to compute."""
        limit = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        return self.tree.match(Namespace(namespace, self.tree.weights), tokens, limit if self.shape.prefix_cache else 0)

    def find_tail(self, name: str, match: Match, tokens: Int32, limit: int | None = None) -> Tail | None:
        """What a parked sequence left behind its last whole page, if it continues the match and has at most `limit`
        tokens."""
        tail = self.tails.find(name, match.namespace, tokens, match.length)
        return None if tail is None or (limit is not None and tail.end > limit) else tail

    def replace_weights(self) -> None:
        """The weights change: what they computed is never found again, and given up where nobody uses it."""
        self.tails.give_up(self.tails.page_count)
        self.pins.give_up()
        self.tree.replace_weights()

    def retain(self, lease: Lease, hint: Retention, now: float) -> int:
        """Keep what the lease has published for as long as the hint says -> tokens that are kept."""
        return self.tree.hints.retain(lease.node, hint, now) if self._is_current(lease) else 0

    def park(self, lease: Lease, name: str, tokens: Int32) -> None:
        """Leave what does not fill a page as a tail under `name`, for the sequence to go on from."""
        if self._is_current(lease):
            lease.park(name, tokens)
        else:
            self.tails.forget(name)

    def _is_current(self, lease: Lease) -> bool:
        """Whether the weights are still those that the lease began with: KV of older ones nobody can find."""
        return lease.node.namespace.weights == self.tree.weights

    def pin(self, name: str, namespace: str, tokens: Int32, expires: float | None) -> PinnedPrefix | None:
        """Keep what is cached of `tokens` [n], within the budget, until `expires`. Raises ValueError."""
        match = self.tree.match(Namespace(namespace, self.tree.weights), tokens)
        return self.pins.pin(name, match, tokens, expires)

    def pass_time(self, now: float) -> None:
        """What hints and pins promised for a time ends with it. Called in every iteration."""
        self.tree.hints.fade(now)
        self.pins.expire(now)

    def slide(self, rows: Int64) -> None:
        """Give back what no later step of `rows` [n] looks at. Called before each step is planned."""
        if self.tree.bounded and len(rows):
            self.leases.slide(rows)

    def publish(self, lease: Lease, tokens: Int32, priority: int = 0) -> None:
        """Share what the lease has committed, if there is a prefix cache."""
        if self.shape.prefix_cache and self._is_current(lease):
            lease.publish(tokens, priority)

    # -- room -----------------------------------------------------------------------------------------

    @property
    def free_page_count(self) -> int:
        """Pages that can be allocated now, in every group."""
        return min(pool.free_count for pool in self.pools)

    @property
    def _coming(self) -> Int64:
        """Pages of each group that are free now or when steps in flight complete."""
        return np.array([pool.free_count + pool.limbo_count for pool in self.pools], np.int64)

    @property
    def reachable_page_counts(self) -> Int64:
        """Pages of each group that are free, can be evicted, or come back when steps in flight complete."""
        evictable = self._by_group(self.tree.evictable_page_count, [one.evictable_count for one in self.tree.bounded])
        return self._coming + self.tails.page_count + evictable

    def _by_group(self, full: int, bounded: Sequence[int]) -> Int64:
        """One number for all full groups, and one for each bounded group -> int64 [groups]."""
        counts: Int64 = np.full(len(self.pools), full, np.int64)
        for one, count in zip(self.tree.bounded, bounded, strict=True):
            counts[one.number] = count
        return counts

    def unheld_page_counts(self, match: Match, released: Collection[Node] = ()) -> Int64:
        """Pages of each group that could be evicted now, and no longer once the match is leased. `released` nodes count
        as not held."""
        full = self.tree.holds.unheld_page_count(match, released)
        return self._by_group(full, [bounded.unread_count(match) for bounded in self.tree.bounded])

    def gain_of(self, rows: Int64) -> tuple[Int64, set[Node]]:
        """What would come back if the leases in `rows` [n] ended -> pages of each group, and the nodes that nothing
        would hold any more."""
        leases = self.leases
        mine = leases.in_rows(rows)
        released = self.tree.holds.only_by([lease.node for lease in mine])
        columns = int(((leases.allocated[rows] - leases.shared[rows]) // self.page_size).sum())
        full = columns + sum(node.page_count for node in released)
        bounded = [
            one.gain_of([leases.row_pages(lease.row, one.number) for lease in mine]) for one in self.tree.bounded
        ]
        return self._by_group(full, bounded), released

    def make_room(self, rows: Int64, targets: Int64, decodes: Bool | None = None, may_unpin: bool = False) -> bool:
        """Make what room there can be for `extend(rows, targets, decodes)`: take back what rejected drafts left, give
        up tails, then evict; as a last resort, `may_unpin`, even what operators have pinned -> whether the
        pages are free now; they may also be on their way, in limbo."""
        shortage = self.leases.lacking(rows, targets, decodes)
        if len(shortage.rows) == 0 or self._are_free(shortage.pages):
            return True
        self.leases.give_back_excess()
        # What was given back may have been these rows' own.
        return self._give_up(self.leases.lacking(rows, targets, decodes).pages, may_unpin)

    def make_room_for(self, needed: Sequence[int], may_unpin: bool = False, keep: str | None = None) -> bool:
        """The same for so many pages of each group. The tail of `keep` is not given up."""
        if self._are_free(needed):
            return True
        self.leases.give_back_excess()
        return self._give_up(needed, may_unpin, keep)

    def _are_free(self, needed: Sequence[int]) -> bool:
        return all(count <= pool.free_count for count, pool in zip(needed, self.pools, strict=True))

    def _give_up(self, needed: Sequence[int], may_unpin: bool, keep: str | None = None) -> bool:
        """Tails, then prefixes, then pins, until `needed` pages are coming -> whether they are free now."""
        missing = self._missing(needed)
        if missing.any():
            self.tails.give_up(int(missing.max()), keep)
            self._evict(needed)
        if may_unpin and len(self.pins) and self._missing(needed).any():
            self.pins.give_up()
            self._evict(needed)
        return self._are_free(needed)

    def _missing(self, needed: Sequence[int]) -> Int64:
        """Pages of each group that are not coming, int64 [groups]."""
        return np.maximum(np.array(needed, np.int64) - self._coming, 0)

    def can_make_room(self, needed: Sequence[int], match: Match, may_unpin: bool = False) -> bool:
        """Whether `needed` pages of each group can be had, now or when steps in flight complete, without evicting the
        match. Changes nothing."""
        room = self.reachable_page_counts - self.unheld_page_counts(match)
        if may_unpin:  # what is held is held by operators
            bounded = self.tree.bounded
            mine = self._by_group(match.length // self.page_size, [len(one.needed(match)) for one in bounded])
            cached = self._by_group(self.tree.page_count, [one.page_count for one in bounded])
            room = self._coming + self.tails.page_count + cached - mine
        return bool((np.array(needed, np.int64) <= room).all())

    def _evict(self, needed: Sequence[int]) -> None:
        cause = f"a step that needed {max(needed)} pages"
        full = [number for number, group in enumerate(self.groups) if not group.is_bounded]
        if full and (most := int(self._missing(needed)[full].max())):
            self.tree.evictor.evict(most, cause)
        for bounded in self.tree.bounded:
            bounded.evict(int(self._missing(needed)[bounded.number]))

    def complete(self, step: int) -> None:
        """The engine has finished `step`: what only it could touch is free now."""
        self.epochs.complete(step)
        for pool in self.pools:
            pool.collect()
        self.leases.collect()

    def counts(self, group: int = 0) -> PageCounts:
        return count_pages(self, group)

    def audit(self) -> None:
        """Raise AuditError unless every page is accounted for exactly once."""
        audit(self)

    def auditing(self) -> Iterator[None]:
        """The audit in short slices, for as long as nothing changes between them. Raises AuditError."""
        return auditing(self)

    def explain(self, page: int) -> str:
        """Who holds a page, since which step, and why it can't be evicted. ValueError if out of range."""
        return explain(self, page)

    def explain_miss(self, match: Match, tokens: Int32, limit: int | None = None) -> Miss:
        """Why not more of `tokens` [n] than `match`, made now with that `limit`, is cached."""
        return explain_miss(self, match, tokens, limit)
