"""Admission: which waiting requests get a row and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from freehold.contract.adapter import fingerprint_of
from freehold.contract.arrays import Int64
from freehold.memory import Hit, Lease, Match, Memory
from freehold.memory.explain import explain_miss
from freehold.memory.lease_table import pages_to_cover
from freehold.memory.prefix.node import PageKey, page_key
from freehold.memory.tiers.loads import LoadPlan
from freehold.scheduler.batch import Batch
from freehold.scheduler.chunk_budget import PromptBudget
from freehold.scheduler.faults import fault_of_one
from freehold.scheduler.lifecycle import Lifecycle
from freehold.scheduler.loading import Loading
from freehold.scheduler.queue import WaitingQueue
from freehold.scheduler.request import Request
from freehold.scheduler.running import RunningTable
from freehold.scheduler.speculation import DraftBudget
from freehold.scheduler.states import RequestState

SHARE_MIN = 0.05
LOOKED_AT_MAX = 64  # requests passed over in one pass


class _Verdict(Enum):
    ADMITTED = auto()
    WAITS = auto()  # running steps or a load will bring what it can share; or its client has used its share
    NO_ROOM = auto()
    FAILED = auto()  # examining it raised an error, which ended it


@dataclass(frozen=True)
class _Prospect:
    """What a request would start with if admitted now: either a `load` that first brings more of its prefix, or a lease
    with `needed` pages of each group up to `target` tokens and states kept at `checkpoints`. `miss` says why no more is
    cached; `key` is the first page it would compute; `is_alone` is true if no other request runs."""

    hit: Hit
    is_alone: bool
    target: int
    checkpoints: Sequence[int]
    needed: Sequence[int]
    key: PageKey | None
    miss: str | None
    load: LoadPlan | None


@dataclass(frozen=True)
class _Refusal:
    """A request that did not fit beside `running` others. `is_final`: it did not fit in the previous pass either, and
    pages then in limbo are free by now."""

    request: str
    running: int
    is_final: bool


class GrowthEstimate:
    """The share of their remaining output that running requests are expected to need.

    It rises when memory runs out and falls slowly while it does not. So requests that stop early are packed tightly,
    and requests that use their max_tokens don't thrash.
    """

    def __init__(self, share: float = 0.3, fall: float = 0.998):
        self.share = share
        self.fall = fall  # factor per step that fits

    def ran_out(self) -> None:
        self.share = min(1.0, self.share + 0.25)

    def went_well(self) -> None:
        self.share = max(SHARE_MIN, self.share * self.fall)


class Admission:
    """Admits waiting requests while the estimated growth of the running ones leaves room."""

    def __init__(
        self,
        memory: Memory,
        queue: WaitingQueue,
        running: RunningTable,
        lifecycle: Lifecycle,
        drafts: DraftBudget | None,
        loading: Loading,
    ):
        self.loading = loading
        self._memory = memory
        self._queue = queue
        self._running = running
        self._lifecycle = lifecycle
        self._drafts = drafts
        self.growth = GrowthEstimate()
        self._refusal: _Refusal | None = None  # the last one
        self._left_waiting = 0  # in the last pass: for another's pages, a load, or their client's turn
        self._claimed = np.zeros(0, np.int64)  # in the last pass: pages of each group for requests waiting for tiers

    def lacks_room(self, request: Request) -> bool:
        """Return True if a request had no room in two passes, and no running request has left since."""
        last = self._refusal_of(request)
        return last is not None and last.is_final

    def _refusal_of(self, request: Request) -> _Refusal | None:
        """Return the last refusal, if it is of this request and no running request has left since."""
        last = self._refusal
        return last if last and last.request == request.id and len(self._running) >= last.running else None

    def candidates(self) -> int:
        """Estimate from the last pass how many waiting requests may get a row in the next step."""
        head = self._queue.peek()
        if head is None or self.lacks_room(head):
            return 0
        return min(max(len(self._queue) - self._left_waiting, 0), self._memory.leases.free_row_count)

    def admit(self, budget: PromptBudget) -> list[Batch]:
        """Spend the rest of the budget on waiting requests. Return their batches."""
        admitted: list[Batch] = []
        self.loading.is_hashing = False
        queue, leases = self._queue, self._memory.leases
        if budget.is_spent or leases.free_row_count == 0:
            return admitted
        queue.rank(self._memory.tree.version, self._match_length)
        sharing = self.pages_being_computed()
        reserved = self.reserved_page_counts()
        self._left_waiting, self._claimed = 0, np.zeros_like(reserved)
        for request in queue.in_turn():
            if budget.is_spent or leases.free_row_count == 0 or self._left_waiting == LOOKED_AT_MAX:
                break
            verdict = self._try_admit(request, budget, reserved, sharing)
            if verdict is _Verdict.NO_ROOM:
                again = self._refusal_of(request)
                self._refusal = _Refusal(request.id, len(self._running), is_final=again is not None)
                break
            if verdict is _Verdict.WAITS:
                self._left_waiting += 1
                continue
            if verdict is _Verdict.ADMITTED:
                lease = request.lease
                assert lease is not None
                rows, count = np.array([lease.row]), lease.reserved - lease.committed
                admitted.append(self._running.batch(rows, np.array([count]), np.zeros(1, np.int64)))
                budget.spend(request.client_number, count)
                reserved += self.growth_page_counts(rows)
        return admitted

    def _try_admit(self, request: Request, budget: PromptBudget, reserved: Int64, sharing: set[PageKey]) -> _Verdict:
        """Admit a request, or leave no trace: it keeps its place in the queue, and nothing is charged. Lookups are
        repeated if room was made since."""
        self.loading.go_on(request)
        if request.state is RequestState.ENDED:
            return _Verdict.FAILED
        prospect = self._look_at(request, budget, reserved, sharing, may_load=True)
        if isinstance(prospect, _Prospect) and prospect.load is not None:
            if self.loading.begin(request, prospect.load, prospect.is_alone, prospect.hit.tail):
                self._claim(request, prospect.hit.match)
                return _Verdict.WAITS
            prospect = self._look_at(request, budget, reserved, sharing, may_load=False)
        if isinstance(prospect, _Verdict):
            return prospect
        lease = self._lease(prospect)
        if lease is None:
            return _Verdict.NO_ROOM
        self._lifecycle.start(request, lease)
        request.miss = request.miss if prospect.miss is None else prospect.miss
        if self._drafts is not None:
            self._drafts.start(lease.row, request.params.constraint is not None)
        if prospect.key is not None:
            sharing.add(prospect.key)
        return _Verdict.ADMITTED

    def _look_at(
        self, request: Request, budget: PromptBudget, reserved: Int64, sharing: set[PageKey], may_load: bool
    ) -> _Prospect | _Verdict:
        """Evaluate admitting a request. Nothing is moved, so a fault ends only this request."""
        try:
            return self._prospect(request, budget, reserved, sharing, may_load)
        except Exception as error:
            self._lifecycle.fail(request, error)
            return _Verdict.FAILED

    def _prospect(
        self, request: Request, budget: PromptBudget, reserved: Int64, sharing: set[PageKey], may_load: bool
    ) -> _Prospect | _Verdict:
        memory, tokens = self._memory, request.tokens
        if budget.offer(request.client_number, 1) == 0:
            return _Verdict.WAITS
        hit = self.look_up(request)
        match, tail = hit.match, hit.tail
        self._start_clock(request, match, reserved)
        if self.waits(request, match, sharing) or (tail is not None and not memory.epochs.passed(tail.fence)):
            return _Verdict.WAITS
        may_load = may_load and not self._queue.is_due(request)
        if may_load and self.loading.lacks_keys(request, match):
            return _Verdict.WAITS
        if not self._fits_beside(request, match, reserved):
            return _Verdict.NO_ROOM
        miss = explain_miss(memory, match, tokens, request.computed_from) if request.cached_tokens is None else None
        load = self.loading.plan(request, match) if may_load else None
        if load is not None and not self._fits_beside(request, match, reserved, self._claimed):
            return _Verdict.WAITS
        size, is_alone = memory.page_size, len(self._running) == 0
        target = hit.length + budget.offer(request.client_number, len(tokens) - hit.length)
        # Keep states where the prompt ends and where other sequences diverged: later requests can resume there.
        checkpoints = (len(request.prompt) - 1) // size * size, match.known
        needed = memory.leases.needs_of_a_row(hit.covered(size), target, checkpoints)
        if load is None and not memory.room.can_be_made(needed, hit, may_unpin=is_alone):
            return _Verdict.NO_ROOM
        key = memory.tree.next_page_key(match, tokens)
        return _Prospect(hit, is_alone, target, checkpoints, needed, key, None if miss is None else str(miss), load)

    def _start_clock(self, request: Request, match: Match, reserved: Int64) -> None:
        """Limit a request's wait for storage once it fits beside the requests before it, and keep room for it."""
        if self.loading.is_awaited(request):
            if self._fits_beside(request, match, reserved, self._claimed):
                self.loading.start_clock(request)
            self._claim(request, match)

    def _claim(self, request: Request, match: Match) -> None:
        """Keep room for a request that waits for tiers: loads for others leave it alone."""
        self._claimed = self._claimed + self.page_counts_of(request, match)

    def waits(self, request: Request, match: Match, sharing: set[PageKey]) -> bool:
        """Return True if the request's next page will be available soon: another request computes it, or a load
        brings it."""
        memory = self._memory
        if self._queue.is_due(request):
            return False
        if self.loading.is_awaited(request):
            return True
        if match.length + memory.page_size > request.computed_from:
            return False
        return memory.tree.next_page_key(match, request.tokens) in sharing

    def _lease(self, prospect: _Prospect) -> Lease | None:
        """Return a lease with pages for the first chunk; or None, undoing it. The lease pins the match, so that making
        room cannot evict it."""
        memory, hit = self._memory, prospect.hit
        lease = memory.leases.open(hit.match)
        if not memory.room.make_for(prospect.needed, prospect.is_alone, keep=hit.tail):
            lease.withdraw()
            return None
        if hit.tail is not None:
            lease.adopt(hit.tail)
        lease.keep_checkpoints(*prospect.checkpoints)
        memory.leases.extend(np.array([lease.row]), np.array([prospect.target]), np.zeros(1, np.bool_))
        return lease

    def look_up(self, request: Request) -> Hit:
        """Return the part of a waiting request that need not be computed."""
        adapter = fingerprint_of(request.adapter)
        limit = request.computed_from
        return self._memory.look_up(request.namespace, request.tokens, limit, adapter, request.session)

    def match(self, request: Request) -> Match | None:
        """Return the match without a tail. Return None if the lookup fails; admission will then end the request."""
        try:
            return self.look_up(request).match
        except Exception as error:
            fault_of_one(error)
            return None

    def _match_length(self, request: Request) -> int:
        match = self.match(request)
        return 0 if match is None else match.length

    def _fits_beside(self, request: Request, match: Match, reserved: Int64, claimed: Int64 | int = 0) -> bool:
        """Return True if the known tokens and estimated output fit beside the expected growth of the running requests
        and the `claimed` pages. The first request always fits."""
        if len(self._running) == 0 and not np.any(claimed):
            return True
        needed = self.page_counts_of(request, match) + self._memory.room.taken_by(match) + reserved + claimed
        return bool((needed <= self._memory.room.reachable).all())

    def page_counts_of(self, request: Request, match: Match) -> Int64:
        """Return pages of each group that a waiting request is expected to need beyond its match, int64 [groups]."""
        columns = self.column_count_of(request) - match.length // self._memory.page_size
        return self._needed(np.array([columns]), np.zeros(1, np.int64))

    def column_count_of(self, request: Request) -> int:
        """Return how many pages a waiting request is expected to fill."""
        length, share = len(request.tokens), self.growth.share if request.is_trusted else 1.0
        ahead = int(share * (self._lifecycle.max_length(request) - length)) + 1
        return -(-(length + ahead) // self._memory.page_size)

    def reserved_page_counts(self) -> Int64:
        return self.growth_page_counts(self._running.order)

    def growth_page_counts(self, rows: Int64) -> Int64:
        """Return pages of each group that `rows` are expected to need beyond those they have, int64 [groups]."""
        running, leases = self._running, self._memory.leases
        length = running.length[rows]
        share = np.where(running.trusted[rows], self.growth.share, 1.0)
        ahead = (share * (running.max_length[rows] - length)).astype(np.int64)
        have = leases.allocated[rows] // self._memory.page_size
        wanted = pages_to_cover(length + ahead, self._memory.page_size) - have
        return self._needed(np.maximum(wanted, 0), have)

    def _needed(self, columns: Int64, have: Int64) -> Int64:
        """Return pages of each group for `columns` [n] more of rows that have `have` [n]. A row of a bounded group
        never holds more than its limit."""
        memory = self._memory
        counts = np.full(len(memory.groups), int(columns.sum()), np.int64)
        for bounded in memory.tree.bounded:
            most = memory.shape.row_needs[bounded.number]
            counts[bounded.number] = int(np.minimum(columns, np.maximum(most - have, 0)).sum())
        return counts

    def pages_being_computed(self) -> set[PageKey]:
        """Return the next unpublished page of each prompt being computed. Requests that need the same page wait for
        it."""
        running, leases, size = self._running, self._memory.leases, self._memory.page_size
        rows = running.order[leases.committed[running.order] < running.prefill_end[running.order]]
        keys: set[PageKey] = set()
        if not self._memory.shape.prefix_cache:
            return keys
        for row in map(int, rows):
            lease = leases.leases[row]
            start = int(leases.shared[row])
            assert lease is not None
            rest = running.tokens[row, start : running.prefill_end[row]]
            key = page_key(lease.node.namespace, lease.node, rest, size)
            if key is not None:
                keys.add(key)
        return keys
