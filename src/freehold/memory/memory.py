"""All KV memory of one engine: pools, prefix tree, leases and the epochs that fence them."""

from collections.abc import Sequence
from dataclasses import dataclass

from freehold.arrays import Int32, Int64
from freehold.memory.audit import PageCounts, audit, count_pages
from freehold.memory.epochs import Epochs
from freehold.memory.explain import Miss, explain, explain_miss
from freehold.memory.group import CacheGroup
from freehold.memory.lease import Lease, LeaseTable
from freehold.memory.node import Match, Namespace
from freehold.memory.pool import PagePool
from freehold.memory.tails import Tail, TailTable
from freehold.memory.tree import PrefixTree

PAGE_SIZES = (1, 4, 16, 64, 256)


@dataclass(frozen=True)
class MemoryShape:
    """How much memory there is and how it is cut. Raises ValueError for what cannot work."""

    page_count: int
    page_size: int = 16
    row_count: int = 256
    token_limit: int = 8192
    eviction_policy: str = "lru"
    prefix_cache: bool = True
    groups: Sequence[CacheGroup] = (CacheGroup(),)

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size must be one of {PAGE_SIZES}, not {self.page_size}")
        if len(self.groups) == 0:
            raise ValueError("a model has at least one cache group")


class Memory:
    """Moves ownership; called by the scheduler thread alone."""

    def __init__(self, shape: MemoryShape):
        self.shape = shape
        self.page_size = shape.page_size
        self.epochs = Epochs()
        self.weight_version = 0
        self.pools = [PagePool(shape.page_count, shape.page_size, self.epochs) for _ in shape.groups]
        self.tree = PrefixTree(self.pools, self.epochs, shape.eviction_policy)
        self.tails = TailTable(self.pools)
        self.leases = LeaseTable(self.pools, self.tree, self.tails, self.epochs, shape.row_count, shape.token_limit)

    @property
    def capacity_tokens(self) -> int:
        return self.shape.page_count * self.page_size

    def match(self, namespace: str, tokens: Int32) -> Match:
        """The longest reusable prefix, leaving at least the last token to compute."""
        limit = len(tokens) - 1 if self.shape.prefix_cache else 0
        return self.tree.match(Namespace(namespace, self.weight_version), tokens, limit)

    def find_tail(self, name: str, match: Match, tokens: Int32) -> Tail | None:
        """What a parked sequence left behind its last whole page, if it continues the match."""
        return self.tails.find(name, match.namespace, tokens, match.length)

    def replace_weights(self) -> None:
        """The weights change: what they computed is never found again, and given up where nobody uses it."""
        self.weight_version += 1
        self.tails.give_up(self.tails.page_count)
        self.tree.flush()

    def publish(self, lease: Lease, tokens: Int32, priority: int = 0) -> None:
        """Share what the lease has committed, if there is a prefix cache."""
        if self.shape.prefix_cache:
            lease.publish(tokens, priority)

    @property
    def free_page_count(self) -> int:
        """Pages that can be allocated now, in every group."""
        return min(pool.free_count for pool in self.pools)

    @property
    def limbo_page_count(self) -> int:
        return max(pool.limbo_count for pool in self.pools)

    @property
    def _coming(self) -> int:
        """Pages free now or when steps in flight complete, in every group."""
        return min(pool.free_count + pool.limbo_count for pool in self.pools)

    @property
    def reachable_page_count(self) -> int:
        """Pages that are free, can be evicted, or come back when steps in flight complete."""
        return self._coming + self.tree.evictable_page_count + self.tails.page_count

    def make_room(self, rows: Int64, targets: Int64) -> bool:
        """Make what room there can be for `extend(rows, targets)`: take back what rejected drafts left, give
        up tails, then evict -> whether the pages are free now; they may also be on their way, in limbo."""
        needed = int(self.leases.page_counts_to_extend(rows, targets).sum())
        if needed > self.free_page_count:
            self.leases.give_back_excess()
            # What was given back may have been these rows' own.
            needed = int(self.leases.page_counts_to_extend(rows, targets).sum())
        if needed > self.free_page_count:
            self.tails.give_up(needed - self._coming)
            if needed > self._coming:
                self.tree.evict(needed - self._coming, f"a step that needed {needed} pages")
        return needed <= self.free_page_count

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

    def explain(self, page: int) -> str:
        """Who holds a page, since which step, and why it can't be evicted. ValueError if out of range."""
        return explain(self, page)

    def explain_miss(self, namespace: str, tokens: Int32) -> Miss:
        """What is cached of `tokens` [n] now, and why no more."""
        return explain_miss(self, namespace, tokens)
