"""All KV memory of one engine: pools, prefix tree, leases and the epochs that fence them."""

from __future__ import annotations

from collections.abc import Iterator

from freehold.arrays import Int32, Int64
from freehold.memory.audit import PageCounts, audit, auditing, count_pages
from freehold.memory.explain import Miss, explain, explain_miss
from freehold.memory.lease import Lease, LeaseTable
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.ledger.pool import PagePool
from freehold.memory.prefix.node import Match, Namespace
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
        self.pools = [PagePool(shape.page_count, shape.page_size, self.epochs) for _ in shape.groups]
        quota = None if shape.tenant_quota is None else shape.pages(shape.tenant_quota)
        retained = shape.pages(shape.retained_share)
        self.tree = PrefixTree(self.pools, self.epochs, shape.eviction_policy, quota, retained)
        self.tails = TailTable(self.pools)
        self.pins = PinTable(self.tree, shape.pages(shape.pinned_share))
        self.leases = LeaseTable(self.pools, self.tree, self.tails, self.epochs, shape.row_count, shape.token_limit)

    @property
    def capacity_tokens(self) -> int:
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

    def publish(self, lease: Lease, tokens: Int32, priority: int = 0) -> None:
        """Share what the lease has committed, if there is a prefix cache."""
        if self.shape.prefix_cache and self._is_current(lease):
            lease.publish(tokens, priority)

    @property
    def free_page_count(self) -> int:
        """Pages that can be allocated now, in every group."""
        return min(pool.free_count for pool in self.pools)

    @property
    def _coming(self) -> int:
        """Pages free now or when steps in flight complete, in every group."""
        return min(pool.free_count + pool.limbo_count for pool in self.pools)

    @property
    def reachable_page_count(self) -> int:
        """Pages that are free, can be evicted, or come back when steps in flight complete."""
        return self._coming + self.tree.evictable_page_count + self.tails.page_count

    def make_room(self, rows: Int64, targets: Int64, may_unpin: bool = False) -> bool:
        """Make what room there can be for `extend(rows, targets)`: take back what rejected drafts left, give
        up tails, then evict; as a last resort, `may_unpin`, even what operators have pinned -> whether the
        pages are free now; they may also be on their way, in limbo."""
        needed = int(self.leases.lacking(rows, targets)[1].sum())
        if needed <= self.free_page_count:
            return True
        self.leases.give_back_excess()
        # What was given back may have been these rows' own.
        return self._give_up(int(self.leases.lacking(rows, targets)[1].sum()), may_unpin)

    def make_room_for(self, needed: int, may_unpin: bool = False, keep: str | None = None) -> bool:
        """The same for `needed` pages of each group. The tail of `keep` is not given up."""
        if needed <= self.free_page_count:
            return True
        self.leases.give_back_excess()
        return self._give_up(needed, may_unpin, keep)

    def _give_up(self, needed: int, may_unpin: bool, keep: str | None = None) -> bool:
        """Tails, then prefixes, then pins, until `needed` pages are coming -> whether they are free now."""
        if needed > self._coming:
            self.tails.give_up(needed - self._coming, keep)
            self._evict(needed)
        if needed > self._coming and may_unpin and len(self.pins):
            self.pins.give_up()
            self._evict(needed)
        return needed <= self.free_page_count

    def can_make_room(self, needed: int, match: Match, may_unpin: bool = False) -> bool:
        """Whether `needed` pages can be had, now or when steps in flight complete, without evicting the match.
        Changes nothing."""
        room = self.reachable_page_count - self.tree.holds.unheld_page_count(match)
        if may_unpin:  # what is held is held by operators
            room = self._coming + self.tails.page_count + self.tree.page_count - match.length // self.page_size
        return needed <= room

    def _evict(self, needed: int) -> None:
        if needed > self._coming:
            self.tree.evictor.evict(needed - self._coming, f"a step that needed {needed} pages")

    def complete(self, step: int) -> None:
        """The engine has finished `step`: what only it could touch is free now."""
        self.epochs.complete(step)
        for pool in self.pools:
            pool.collect()
        self.leases.collect()

    def counts(self) -> PageCounts:
        return count_pages(self)

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
