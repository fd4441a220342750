"""Memory with host pages and storage below it, and a mover that does nothing until it is told to."""

import numpy as np
from test_groups import compute

from freehold.contract.orders import Kind, Order, Outcome
from freehold.memory import CacheGroup, Memory, MemoryShape, TierPlan, WritePolicy

FULL = CacheGroup()
WINDOW = CacheGroup("window", lookback=8, page_count=30)
STATE = CacheGroup("state", lookback=1, is_state=True, page_count=12)
TOKENS = np.arange(1, 33, dtype=np.int32)
SIZE = 4


class HandMover:
    """Does nothing until the test says so. Each page holds one number, a new one for each page that is computed."""

    def __init__(self):
        self.orders: list[tuple[Order, object]] = []
        self.device: dict[tuple[int, int], object] = {}
        self.host: dict[tuple[int, int], object] = {}
        self.stored: dict[bytes, object] = {}
        self.seconds = 0.01  # that an order says it took

    def begin(self, order, report):
        self.orders.append((order, report))

    def wait(self, seconds):
        """Nothing comes by itself."""

    def end(self, order=None, whole=None, times=1):
        """End an order, the oldest: `whole` says which pages arrive, else all do that can."""
        at = 0 if order is None else next(i for i, (one, _) in enumerate(self.orders) if one is order)
        order, report = self.orders.pop(at)
        arrived = []
        for group, count in enumerate(order.page_counts):
            wanted = np.ones(count, bool) if whole is None else np.array(whole[group], bool)
            arrived.append(np.array([bool(wanted[i]) and self._move(order, group, i) for i in range(count)], bool))
        for _ in range(times):
            failed = order.kind is not Kind.PROBE and not all(part.all() for part in arrived)
            report(Outcome(order.number, arrived, self.seconds, "failed" if failed else None))
        return order

    def _move(self, order, group, i):
        if order.kind is Kind.BACKUP:
            self.host[group, int(order.host[group][i])] = self.device.get((group, int(order.device[group][i])))
        elif order.kind is Kind.LOAD:
            self.device[group, int(order.device[group][i])] = self.host[group, int(order.host[group][i])]
        elif order.kind is Kind.STORE:
            self.stored[order.keys[group][i]] = self.host[group, int(order.host[group][i])]
        elif order.keys[group][i] not in self.stored:
            return False
        elif order.kind is Kind.FETCH:
            self.host[group, int(order.host[group][i])] = self.stored[order.keys[group][i]]
        return True


class Bench:
    """Memory with tiers, and a hand on the mover."""

    def __init__(
        self, *groups, policy=WritePolicy.WRITE_THROUGH, host=64, pages=64, storage=None, mover=None, identity=b"one"
    ):
        groups = groups or (FULL,)
        self.mover = mover or HandMover()
        self.mover.orders.clear()
        shape = MemoryShape(pages, SIZE, 8, 400, "lru", groups=groups, step_tokens=16)
        names = tuple(group.name.encode() for group in groups)
        tiers = TierPlan((host,) * len(groups), (64,) * len(groups), names, identity, policy, storage)
        self.memory = Memory(shape, tiers, self.mover)
        self.tiers = self.memory.tiers
        self.now = 0.0

    def turn(self, seconds=0.01):
        """An iteration in which nothing is computed: transfers settle all the same."""
        self.now += seconds
        self.memory.pass_time(self.now)
        self.memory.audit()

    def settle(self):
        """Until nothing is on its way."""
        self.turn()
        while self.mover.orders:
            self.mover.end()
            self.turn()
        assert not self.tiers.has_work

    def compute(self, tokens=TOKENS, **options):
        """Compute a prompt and let it go: what is committed stays cached."""
        lease = compute(self.memory, tokens, **options)
        lease.release()

    def evict_all(self):
        memory = self.memory
        memory.tree.evictor.evict(memory.tree.evictable_page_count, "a test")
        for bounded in memory.tree.bounded:
            bounded.evict(bounded.page_count)
        memory.audit()

    def plan(self, tokens=TOKENS, salt=""):
        match = self.memory.match(salt, np.append(tokens, np.int32(0)))
        return self.tiers.loads.plan(match, self.tiers.keys(match.namespace, tokens), len(tokens))

    def load(self, tokens=TOKENS):
        """-> tokens that the device has then."""
        plan = self.plan(tokens)
        if plan is not None:
            assert self.tiers.loads.begin(plan, is_alone=False) is not None
            self.settle()
        return self.matched(tokens)

    def matched(self, tokens=TOKENS, salt=""):
        return self.memory.match(salt, np.append(tokens, np.int32(0))).length

    @property
    def host_free(self):
        return [pages.pool.free_count for pages in self.tiers.host.pages]


def namespaced(bench):
    return bench.memory.match("", TOKENS).namespace, TOKENS
