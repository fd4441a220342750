"""Whether a waiting request's prefix comes from a deeper tier, or is computed."""

from __future__ import annotations

from freehold.adapter import fingerprint_of
from freehold.memory import Match, Memory, Namespace
from freehold.memory.tiers.storage import Prefetch, Storage
from freehold.memory.tiers.tiers import Tiers
from freehold.prefix_keys import KeyChain
from freehold.scheduler.request import Request
from freehold.scheduler.step_time import StepTime

LOADS_MAX = 2  # for one request: what is evicted again before it is admitted is then computed


class Loading:
    """Begins loads for requests that would be admitted, and lets them wait for those in flight."""

    def __init__(self, memory: Memory, time: StepTime):
        self._memory = memory
        self._time = time

    def prefetch(self, request: Request, now: float) -> None:
        """A request has come: have what storage knows of it fetched while it waits."""
        tiers = self._memory.tiers
        if tiers is None or tiers.storage is None:
            return
        request.deeper.prefetch = self._prefetch(tiers, tiers.storage, request, now)

    def _prefetch(self, tiers: Tiers, storage: Storage, request: Request, now: float) -> Prefetch | None:
        namespace = self._memory.tree.namespace(request.namespace, fingerprint_of(request.adapter))
        keys = self._keys(tiers, request, namespace)
        return storage.prefetch(namespace, keys, self._limit(request), now)

    def is_awaited(self, request: Request) -> bool:
        """Whether what the request waits for is on its way, and not late."""
        tiers, deeper = self._memory.tiers, request.deeper
        if tiers is None:
            return False
        if tiers.storage is not None and deeper.prefetch is not None:
            if deeper.prefetch.is_over and deeper.prefetch.keys is not deeper.keys:
                # It was for another that begins alike.
                deeper.prefetch = self._prefetch(tiers, tiers.storage, request, tiers.transfers.now)
        if tiers.storage is not None and deeper.prefetch is not None and tiers.storage.is_awaited(deeper.prefetch):
            return True
        return deeper.load is not None and tiers.transfers.is_awaited(deeper.load)

    def _limit(self, request: Request) -> int:
        """How many tokens may come from caches."""
        return min(len(request.tokens) - 1, request.computed_from)

    def begin(self, request: Request, match: Match, is_alone: bool) -> bool:
        """Whether the request had better wait: a load that is in flight, or begins now, brings more of its prefix, and
        sooner than that would be computed. `is_alone`: nobody runs."""
        tiers, deeper = self._memory.tiers, request.deeper
        if tiers is None or deeper.load_count >= LOADS_MAX:
            return False
        plan = tiers.loads.plan(match, self._keys(tiers, request, match.namespace), self._limit(request))
        if plan is None or tiers.loads.seconds(plan) > plan.gain * self._time.token > 0:
            return False
        number = tiers.loads.underway(plan)
        if number is None:
            number = tiers.loads.begin(plan, is_alone)
        if number is not None and number != deeper.load:
            deeper.load_count += 1
            deeper.load, deeper.begin, deeper.end = number, match.length, plan.boundary
        return self.is_awaited(request)

    def _keys(self, tiers: Tiers, request: Request, namespace: Namespace) -> KeyChain:
        known = request.deeper.keys
        is_other = request.deeper.namespace != namespace
        if known is None or is_other or len(known.tokens) != len(request.tokens):
            known = request.deeper.keys = tiers.keys(namespace, request.tokens)
            request.deeper.namespace = namespace
        return known
