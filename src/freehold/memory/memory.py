"""All KV memory of one engine: pools, prefix tree, leases and the epochs that fence them."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from freehold.contract.arrays import Int32
from freehold.contract.orders import Mover
from freehold.contract.prefix_keys import fingerprint
from freehold.contract.slices import finished
from freehold.memory.audit import audit, auditing
from freehold.memory.counts import PageCounts, count_pages
from freehold.memory.events import EventLog
from freehold.memory.hit import Hit
from freehold.memory.lease import Lease
from freehold.memory.lease_table import LeaseTable
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.ledger.pool import PagePool
from freehold.memory.prefix.node import Match
from freehold.memory.prefix.pins import PinnedPrefix, PinTable
from freehold.memory.prefix.retention import Retention
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.room import Room
from freehold.memory.shape import MemoryShape
from freehold.memory.tails import TailTable
from freehold.memory.tiers.tiers import TierPlan, Tiers

TAILS_AT_ONCE = 32  # in a slice


class Memory:
    """Moves ownership; called by the scheduler thread alone. With a `tier_plan` there is a host tier, and `mover`
    copies pages to and from it. `events` records what enters and leaves the cache."""

    def __init__(
        self,
        shape: MemoryShape,
        tier_plan: TierPlan | None = None,
        mover: Mover | None = None,
        events: EventLog | None = None,
    ):
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
        self.room = Room(self)
        self.tiers: Tiers | None = None
        if tier_plan is not None:
            assert mover is not None
            self.tiers = Tiers(tier_plan, shape.groups, self.tree, self.epochs, mover, self.room)
            self.room.add_tiers(self.tiers)
        self.events = events
        if events is not None:
            self._tell(events)

    def _tell(self, events: EventLog) -> None:
        """Report cache changes to `events` from now on."""
        self.tree.watchers.append(events)
        if self.tiers is None:
            self.tree.seed = lambda namespace: fingerprint(namespace._asdict())
        else:
            self.tiers.host.pages[0].events = events

    @property
    def capacity_tokens(self) -> int:
        """The most tokens that one sequence can have."""
        if not self.shape.has_full_groups:
            return self.shape.token_limit
        return self.shape.page_count * self.page_size

    def match(self, salt: str, tokens: Int32, limit: int | None = None, adapter: str = "") -> Match:
        """Return the longest reusable prefix of at most `limit` tokens, leaving at least the last one to compute."""
        limit = len(tokens) - 1 if limit is None else min(limit, len(tokens) - 1)
        return self.tree.match(self.tree.namespace(salt, adapter), tokens, limit if self.shape.prefix_cache else 0)

    def look_up(
        self, salt: str, tokens: Int32, limit: int | None = None, adapter: str = "", session: str | None = None
    ) -> Hit:
        """Return the cached part of `tokens` [n], at most `limit`, with the session's tail if it continues the
        match."""
        match = self.match(salt, tokens, limit, adapter)
        tail = None if session is None else self.tails.find(session, match.namespace, tokens, match.length)
        return Hit(match, None if tail is None or (limit is not None and tail.end > limit) else tail)

    def replace_weights(self, weights: bytes = b"") -> None:
        """Run `replacing_weights` in one piece."""
        finished(self.replacing_weights(weights))

    def replacing_weights(self, weights: bytes) -> Generator[None, None, None]:
        """Switch to weights with this fingerprint. KV of the old ones is never found again on device and host, and
        freed in slices where unused. In storage it is found if the old weights return."""
        if self.tiers is not None:
            self.tiers.weights = weights
        self.pins.give_up()
        self.tree.replace_weights()
        yield from self._giving_up_tails()
        yield from self.tree.evictor.forgetting(self.tree.weights)
        if self.tiers is not None:
            yield from self.tiers.host.clearing()

    def retain(self, lease: Lease, hint: Retention, now: float) -> int:
        """Keep what the lease has published for as long as the hint says. Return the number of tokens kept."""
        return self.tree.hints.retain(lease.node, hint, now) if self._is_current(lease) else 0

    def park(self, lease: Lease, name: str, tokens: Int32) -> None:
        """Park the tokens that do not fill a page as a tail under `name`, for the sequence to resume from."""
        if self._is_current(lease):
            lease.park(name, tokens)
        else:
            self.tails.forget(name)

    def _is_current(self, lease: Lease) -> bool:
        """Return whether the weights are still those the lease began with. KV of older ones can't be found."""
        return lease.node.namespace.weights == self.tree.weights

    def pin(self, name: str, salt: str, tokens: Int32, expires: float | None, adapter: str = "") -> PinnedPrefix | None:
        """Keep the cached part of `tokens` [n], within the budget, until `expires`. Raise PinRefused."""
        match = self.tree.match(self.tree.namespace(salt, adapter), tokens)
        return self.pins.pin(name, match, tokens, expires)

    def flushing(self) -> Generator[None, None, int]:
        """Forget all unused prefixes and tails cached now, on device and host, in slices. Return the number of device
        pages freed. Unfinished copies to the host are abandoned."""
        while self.tiers is not None and self.tiers.backup.give_up():
            pass
        tails = yield from self._giving_up_tails()
        columns = yield from self.tree.evictor.flushing()
        if self.tiers is not None:
            yield from self.tiers.host.clearing()
        return tails + columns

    def _giving_up_tails(self) -> Generator[None, None, int]:
        """Free as many tails as there are now, oldest first, in slices. Return how many."""
        tails = self.tails.page_count
        for _ in range(0, tails, TAILS_AT_ONCE):
            self.tails.give_up(TAILS_AT_ONCE)
            yield
        return tails

    def flush(self) -> int:
        """Run `flushing` in one piece. Return the number of device pages freed."""
        return finished(self.flushing())

    @property
    def has_transfer_work(self) -> bool:
        """Whether `pass_time` would settle or begin a transfer."""
        return self.tiers is not None and self.tiers.has_work

    @property
    def awaits_transfers(self) -> bool:
        """Whether transfers are in flight and not late."""
        return self.tiers is not None and self.tiers.transfers.are_awaited

    def await_transfer(self, seconds: float) -> None:
        """Wait for a transfer to end, at most `seconds`; return at once if none is awaited."""
        if self.tiers is not None and self.awaits_transfers:
            self.tiers.transfers.wait(seconds)

    def pass_time(self, now: float) -> None:
        """Settle finished transfers, fade hints and expire pins. Called in every iteration."""
        if self.tiers is not None:
            self.tiers.settle(now)
        self.tree.hints.fade(now)
        self.pins.expire(now)

    def publish(self, lease: Lease, tokens: Int32, priority: int = 0) -> None:
        """Share what the lease has committed, if the prefix cache is enabled."""
        if self.shape.prefix_cache and self._is_current(lease):
            lease.publish(tokens, priority)

    @property
    def free_page_count(self) -> int:
        """Pages that can be allocated now, in every group."""
        return min(pool.free_count for pool in self.pools)

    def complete(self, step: int) -> None:
        """Record that the engine finished `step`. Pages that only it could touch become free."""
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
        """Audit in short slices, as long as nothing changes between them. Raise AuditError."""
        return auditing(self)
