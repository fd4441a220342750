"""Whether a waiting request's prefix is loaded from a deeper tier or computed."""

from __future__ import annotations

import math

from freehold.contract.adapter import fingerprint_of
from freehold.contract.prefix_keys import KeyChain
from freehold.contract.slices import finished
from freehold.memory import Match, Memory, Namespace
from freehold.memory.tails import Tail
from freehold.memory.tiers.loads import LoadPlan
from freehold.memory.tiers.storage import Storage
from freehold.memory.tiers.tiers import Tiers
from freehold.scheduler.lifecycle import Lifecycle
from freehold.scheduler.request import Request
from freehold.scheduler.step_time import StepTime

LOADS_MAX = 2  # per prefix and request: a prefix evicted again before admission is then computed


class Loading:
    """Begins loads for requests about to be admitted, and makes requests wait for loads in flight."""

    def __init__(self, memory: Memory, lifecycle: Lifecycle, time: StepTime):
        self._memory = memory
        self._lifecycle = lifecycle
        self._time = time
        self.is_hashing = False  # in this pass of admission

    def prefetch(self, request: Request, now: float) -> None:
        """Start fetching a new request's prefix from storage, while it waits."""
        tiers = self._memory.tiers
        if tiers is not None and tiers.storage is not None:
            request.deeper.deadline = math.inf if tiers.storage.patience else now
            self._prefetch(tiers, tiers.storage, request, now)

    def go_on(self, request: Request) -> None:
        """Begin the request's own prefetch once the one it joined, of another sequence, is over."""
        tiers, deeper = self._memory.tiers, request.deeper
        if tiers is None or tiers.storage is None or deeper.prefetch is None:
            return
        is_over = deeper.prefetch.is_over and deeper.prefetch.keys is not deeper.keys
        if is_over and tiers.transfers.now < deeper.deadline:
            self._prefetch(tiers, tiers.storage, request, tiers.transfers.now)

    def _prefetch(self, tiers: Tiers, storage: Storage, request: Request, now: float) -> None:
        """Join or begin a prefetch. The lookup moves nothing, so a fault ends only this request."""
        try:
            namespace = self._memory.tree.namespace(request.namespace, fingerprint_of(request.adapter))
            keys = self._keys(tiers, request, namespace)
            prefetch = finished(storage.looking_up(namespace, keys, self._limit(request), now))
        except Exception as error:
            self._lifecycle.fail(request, error)
            return
        if prefetch is not None:
            storage.join(prefetch)
        request.deeper.give_up_prefetch()
        request.deeper.prefetch = prefetch

    def start_clock(self, request: Request) -> None:
        """Limit the request's wait for storage from now on: it could run without. The policy's patience holds however
        many prefetches it takes. Idempotent."""
        tiers, deeper = self._memory.tiers, request.deeper
        if tiers is not None and tiers.storage is not None:
            deeper.deadline = min(deeper.deadline, tiers.transfers.now + tiers.storage.patience)

    def is_awaited(self, request: Request) -> bool:
        """Return whether the request's prefetch or load is under way and not late."""
        tiers, deeper = self._memory.tiers, request.deeper
        if tiers is None:
            return False
        if tiers.storage is not None and deeper.prefetch is not None and tiers.storage.is_coming(deeper.prefetch):
            if tiers.transfers.now < deeper.deadline:
                return True
        return deeper.load is not None and tiers.transfers.is_awaited(deeper.load)

    def lacks_keys(self, request: Request, match: Match) -> bool:
        """Return True if the request must wait for its page keys. Hashing a long prompt is slow, so each pass of
        admission hashes only some."""
        tiers = self._memory.tiers
        if tiers is None or request.deeper.load_count >= LOADS_MAX:
            return False
        keys, limit = self._keys(tiers, request, match.namespace), self._limit(request)
        if self.is_hashing:
            return tiers.reach.lacks_keys(match, keys, limit)
        self.is_hashing = tiers.reach.hash_some(match, keys, limit)
        return self.is_hashing

    def _limit(self, request: Request) -> int:
        """Return how many tokens may come from caches."""
        return min(len(request.tokens) - 1, request.computed_from)

    def plan(self, request: Request, match: Match) -> LoadPlan | None:
        """Return the load that brings more of the prefix sooner than computing it, or None. Moves nothing."""
        tiers, deeper = self._memory.tiers, request.deeper
        if tiers is None or deeper.load_count >= LOADS_MAX:
            return None
        plan = tiers.loads.plan(match, self._keys(tiers, request, match.namespace), self._limit(request))
        return tiers.loads.piece_of(plan) if plan is not None and tiers.loads.pays(plan, self._time.token) else None

    def begin(self, request: Request, plan: LoadPlan, is_alone: bool, keep: Tail | None) -> bool:
        """Begin or join the planned load. Return whether the request must wait for it. `is_alone`: no request runs;
        `keep` is not evicted for it."""
        tiers, deeper = self._memory.tiers, request.deeper
        assert tiers is not None
        number = tiers.loads.underway(plan)
        if number is None:
            number = tiers.loads.begin(plan, is_alone, keep)
        if number is None:  # pages evicted for the load may still be being copied to the host
            return self._memory.room.is_returning
        if number != deeper.load:
            if deeper.load is None or plan.match.known <= deeper.known:  # the earlier load was evicted
                deeper.load_count += 1
                deeper.begin = plan.match.length
            deeper.load, deeper.known, deeper.end = number, plan.match.known, plan.boundary
        return self.is_awaited(request)

    def _keys(self, tiers: Tiers, request: Request, namespace: Namespace) -> KeyChain:
        known = request.deeper.keys
        is_other = request.deeper.namespace != namespace
        if known is None or is_other or len(known.tokens) != len(request.tokens):
            known = request.deeper.keys = tiers.keys(namespace, request.tokens)
            request.deeper.namespace = namespace
        return known
