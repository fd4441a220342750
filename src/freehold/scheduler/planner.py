"""Which sequences run in the next step, with how many tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from freehold.arrays import Int32, Int64
from freehold.config import EngineConfig
from freehold.memory import Match, Memory
from freehold.memory.lease import pages_to_cover
from freehold.memory.node import Namespace
from freehold.scheduler.lifecycle import Lifecycle
from freehold.scheduler.queue import WaitingQueue
from freehold.scheduler.request import Finish, FinishKind, Request
from freehold.scheduler.running import RETRACTIONS_TRUSTED, RunningTable
from freehold.scheduler.speculation import DraftBudget
from freehold.scheduler.states import Event
from freehold.step import FROM_DEVICE, Step

PASSED_OVER_MAX = 64  # waiting requests looked at and left waiting in one pass


class NoStep(Enum):
    """Why there is nothing to submit."""

    IDLE = auto()  # nobody has tokens to compute
    BLOCKED = auto()  # the steps in flight must complete first


class _Admission(Enum):
    ADMITTED = auto()
    WAITS = auto()  # a step in flight, or the next ones, will bring what it can share
    NO_ROOM = auto()


@dataclass
class _Batch:
    """Rows of a step [n], their known new tokens and the drafts on top."""

    rows: Int64
    counts: Int64
    drafts: Int64

    @classmethod
    def of(cls, rows: Int64, counts: Int64) -> _Batch:
        return cls(rows, counts, np.zeros(len(rows), np.int64))

    def __add__(self, more: _Batch) -> _Batch:
        return _Batch(*(np.concatenate([getattr(self, name), getattr(more, name)]) for name in _BATCH_FIELDS))


_BATCH_FIELDS = ("rows", "counts", "drafts")


class GrowthEstimate:
    """What share of their remaining output the running requests will come to need.

    Rises when memory ran out, falls slowly while it does not: so a workload whose requests stop early
    is packed tightly and one that uses its max_tokens is not made to thrash.
    """

    def __init__(self, share: float = 0.3):
        self.share = share

    def ran_out(self) -> None:
        self.share = min(1.0, self.share + 0.25)

    def went_well(self) -> None:
        self.share = max(0.05, self.share * 0.998)


class Planner:
    """Plans one step at a time under a budget: one token for each decoding row, and at most
    `chunked_prefill_size` tokens of prompts, of as many requests as they come from."""

    def __init__(
        self,
        config: EngineConfig,
        memory: Memory,
        queue: WaitingQueue,
        running: RunningTable,
        lifecycle: Lifecycle,
        drafts: DraftBudget | None = None,
    ):
        self._memory = memory
        self._queue = queue
        self._running = running
        self._lifecycle = lifecycle
        self._drafts = drafts
        self._preemption_threshold = config.priority_scheduling_preemption_threshold
        self._chunk = config.chunked_prefill_size
        self._retract_interval = config.forward_retract_interval
        self._steps_since_retraction = 0
        self.growth = GrowthEstimate()

    def plan(self, in_flight: int) -> Step | NoStep:
        """The next step, with its pages allocated and its rows marked; or why there is none.

        Requests are retracted only while nothing is in flight: a step's result is never thrown away.
        """
        if self._must_retract() or self._must_preempt():
            if in_flight:
                return NoStep.BLOCKED
            self._retract_for_test()
            self._preempt()
        batch = self._continue()
        fits = self._make_room(batch)
        if not fits and batch.drafts.any():
            batch.drafts[:] = 0
            fits = self._make_room(batch)
        if not fits and in_flight:
            return NoStep.BLOCKED
        if not fits:
            batch = self._retract_until_it_fits()
        self._memory.leases.extend(batch.rows, self._targets(batch))
        if fits and len(self._queue):
            batch = batch + self._admit(batch)
        if len(batch.rows) == 0:
            return NoStep.BLOCKED if in_flight else NoStep.IDLE
        return self._step(batch)

    # -- requests that have a row ---------------------------------------------------------------------

    def _continue(self) -> _Batch:
        """Rows that go on, decoding ones first."""
        running = self._running
        rows = running.active()
        decoding = running.is_decoding(rows)
        decoders, chunks = rows[decoding], rows[~decoding]
        sizes = running.todo(chunks)
        if len(chunks):
            sizes = np.clip(self._chunk - (sizes.cumsum() - sizes), 0, sizes)
            chunks, sizes = chunks[sizes > 0], sizes[sizes > 0]
        batch = _Batch.of(decoders, np.ones(len(decoders), np.int64))
        if self._drafts is not None and len(decoders):
            batch.drafts = self._drafts.choose(decoders, len(decoders) + int(sizes.sum()))
        return batch + _Batch.of(chunks, sizes) if len(chunks) else batch

    def _targets(self, batch: _Batch) -> Int64:
        return self._running.targets(batch.rows, batch.counts + batch.drafts)

    def _make_room(self, batch: _Batch) -> bool:
        return self._memory.make_room(batch.rows, self._targets(batch))

    def _retract_until_it_fits(self) -> _Batch:
        """Free memory by sending the least important requests back to the queue. The most important one
        stays, so there is always progress; if it cannot go on even alone, it is ended."""
        while True:
            batch = self._continue()
            batch.drafts[:] = 0
            if self._make_room(batch):
                return batch
            victim = self._victim()
            if len(self._running) == 1:
                self._end_exhausted(self._running.request(victim))
            else:
                self.growth.ran_out()
                self._lifecycle.retract(victim, Event.RETRACTED)

    def _end_exhausted(self, request: Request) -> None:
        message = (
            f"the request alone has filled the KV memory of {self._memory.capacity_tokens} tokens: "
            "ask for less output, or start with more pages (num_pages, kv_cache_memory_bytes)"
        )
        self._lifecycle.end(request, Finish(FinishKind.ERROR, message=message))

    def _victim(self) -> int:
        """The row of lowest priority, among equals the one that arrived last."""
        requests = [self._running.request(int(row)) for row in self._running.order]
        chosen = min(requests, key=lambda request: (request.priority, -request.order))
        assert chosen.lease is not None
        return chosen.lease.row

    def _must_retract(self) -> bool:
        return 0 < self._retract_interval <= self._steps_since_retraction and len(self._running) > 0

    def _retract_for_test(self) -> None:
        """The test switch `forward_retract_interval`: everybody's turn comes. Only a request that has
        moved on since it was admitted is retracted, or small chunks would never get anywhere."""
        if not self._must_retract():
            return
        self._steps_since_retraction = 0
        order, running = self._running.order, self._running
        moved = order[running.length[order] > running.prefill_end[order]]
        if len(moved):
            victim = min(moved.tolist(), key=lambda row: running.request(row).retractions)
            self._lifecycle.retract(victim, Event.RETRACTED)

    # -- priority preemption ----------------------------------------------------------------------------

    def _inferior(self, request: Request) -> list[int]:
        """Rows that may be preempted for `request`, least important first."""
        assert self._preemption_threshold is not None
        running, limit = self._running, request.priority - self._preemption_threshold
        rows = [row for row in running.order.tolist() if running.request(row).priority <= limit]
        return sorted(rows, key=lambda row: (running.request(row).priority, -running.request(row).order))

    def _must_preempt(self) -> bool:
        """Whether the most important waiting request has no place, and would have one if less important
        ones went."""
        if self._preemption_threshold is None:
            return False
        head = self._queue.peek()
        if head is None:
            return False
        inferior = self._inferior(head)
        if not inferior:
            return False
        match = self._match(head)
        needed = self._page_count_of(head, match) + self._memory.tree.unheld_page_count(match)
        others = np.array([row for row in self._running.order.tolist() if row not in inferior], np.int64)
        reserved = self._growth_page_count(others)
        room = self._memory.reachable_page_count
        if self._memory.leases.free_row_count and needed + self._reserved_page_count() <= room:
            return False
        leases = self._memory.leases
        rows = np.array(inferior, np.int64)
        private = (leases.allocated[rows] - leases.shared[rows]) // self._memory.page_size
        return needed + reserved <= room + int(private.sum())

    def _preempt(self) -> None:
        """One at a time: the next plan looks again."""
        if self._must_preempt():
            head = self._queue.peek()
            assert head is not None
            self._lifecycle.retract(self._inferior(head)[0], Event.PREEMPTED)

    # -- requests that wait -----------------------------------------------------------------------------

    def _admit(self, batch: _Batch) -> _Batch:
        """Give what is left of the budget to waiting requests -> the rows they got."""
        admitted = _Batch.of(np.empty(0, np.int64), np.empty(0, np.int64))
        budget = self._chunk - int(batch.counts[batch.counts > 1].sum())
        if budget <= 0:
            return admitted
        self._queue.rank_by_match(lambda request: self._match(request).length)
        sharing = self._pages_being_computed()
        reserved = self._reserved_page_count()
        passed_over: list[Request] = []
        while budget > 0 and self._memory.leases.free_row_count and len(passed_over) < PASSED_OVER_MAX:
            request = self._queue.pop()
            if request is None:
                break
            verdict, count = self._try_admit(request, budget, reserved, sharing)
            if verdict is not _Admission.ADMITTED:
                passed_over.append(request)
                if verdict is _Admission.NO_ROOM:
                    break
                continue
            assert request.lease is not None
            rows = np.array([request.lease.row])
            admitted = admitted + _Batch.of(rows, np.array([count]))
            budget -= count
            reserved += self._growth_page_count(rows)
        for request in passed_over:
            self._queue.push(request)
        return admitted

    def _try_admit(
        self, request: Request, budget: int, reserved: int, sharing: set[tuple[Namespace, int, bytes]]
    ) -> tuple[_Admission, int]:
        memory = self._memory
        tokens = request.tokens
        match = memory.match(request.namespace, tokens)
        key = memory.tree.next_page_key(match, tokens)
        if key is not None and key in sharing:
            return _Admission.WAITS, 0
        if not self._fits_beside(request, match, reserved):
            return _Admission.NO_ROOM, 0
        tail = None if request.session is None else memory.find_tail(request.session, match, tokens)
        if tail is not None and not memory.epochs.passed(tail.fence):
            return _Admission.WAITS, 0
        if request.cached_tokens is None:
            request.miss = str(memory.explain_miss(request.namespace, tokens))
        # The lease pins the match, so that making room cannot evict it.
        lease = memory.leases.open(match, request.priority)
        if tail is not None and request.session is not None:
            lease.adopt(request.session)
        count = min(len(tokens) - lease.committed, budget)
        rows, targets = np.array([lease.row]), np.array([lease.committed + count])
        if not memory.make_room(rows, targets):
            if request.session is not None:
                lease.park(request.session, tokens)
            lease.release()
            return _Admission.NO_ROOM, 0
        memory.leases.extend(rows, targets)
        self._lifecycle.start(request, lease)
        if self._drafts is not None:
            self._drafts.start(lease.row)
        if key is not None:
            sharing.add(key)
        return _Admission.ADMITTED, count

    def _match(self, request: Request) -> Match:
        return self._memory.match(request.namespace, request.tokens)

    def _fits_beside(self, request: Request, match: Match, reserved: int) -> bool:
        """Whether the request's known tokens, and its estimated share of output, can be had without
        taking what the running requests are expected to need. The first request always fits."""
        if len(self._running) == 0:
            return True
        taken = self._memory.tree.unheld_page_count(match)
        return self._page_count_of(request, match) + reserved + taken <= self._memory.reachable_page_count

    def _page_count_of(self, request: Request, match: Match) -> int:
        """Pages that a waiting request is expected to need beyond its match."""
        length, size = len(request.prompt) + len(request.output), self._memory.page_size
        share = 1.0 if request.retractions >= RETRACTIONS_TRUSTED else self.growth.share
        ahead = int(share * (self._lifecycle.max_length(request) - length)) + 1
        return -(-(length + ahead) // size) - match.length // size

    def _reserved_page_count(self) -> int:
        return self._growth_page_count(self._running.order)

    def _growth_page_count(self, rows: Int64) -> int:
        """Pages that `rows` are expected to need beyond those they have."""
        running, memory = self._running, self._memory
        length = running.length[rows]
        share = np.where(running.trusted[rows], self.growth.share, 1.0)
        ahead = (share * (running.max_length[rows] - length)).astype(np.int64)
        have = memory.leases.allocated[rows] // memory.page_size
        wanted = pages_to_cover(length + ahead, memory.page_size) - have
        return int(np.maximum(wanted, 0).sum())

    def _pages_being_computed(self) -> set[tuple[Namespace, int, bytes]]:
        """The next unpublished page of each prompt that is being computed: a request that would compute
        the same page waits for it instead."""
        running, leases, size = self._running, self._memory.leases, self._memory.page_size
        rows = running.order[leases.committed[running.order] < running.prefill_end[running.order]]
        keys: set[tuple[Namespace, int, bytes]] = set()
        if not self._memory.shape.prefix_cache:
            return keys
        for row in map(int, rows):
            lease = leases.leases[row]
            start = int(leases.shared[row])
            assert lease is not None
            if start + size <= running.prefill_end[row]:
                serial = lease.node.serial if start else 0
                page = running.tokens[row, start : start + size].tobytes()
                keys.add((lease.node.namespace, serial, page))
        return keys

    # -- the step ---------------------------------------------------------------------------------------

    def _step(self, batch: _Batch) -> Step:
        running, memory = self._running, self._memory
        rows, counts = batch.rows, batch.counts
        starts = running.scheduled[rows]
        samples = running.is_decoding(rows)
        if not samples.all():
            samples |= starts + counts >= running.length[rows] + running.pending[rows]
        number = memory.epochs.submit()
        step = Step(
            number=number,
            rows=rows,
            starts=starts,
            counts=counts,
            tokens=self._input_tokens(rows, starts, counts),
            samples=samples,
            drafts=batch.drafts,
            row_starts=self._lifecycle.row_starts,
            page_updates=memory.leases.take_updates(),
        )
        self._lifecycle.row_starts = []
        running.scheduled[rows] = self._targets(batch)
        running.pending[rows] += samples * (1 + batch.drafts)
        running.certain[rows] += samples
        memory.leases.submit(rows, number)
        self.growth.went_well()
        self._steps_since_retraction += 1
        return step

    def _input_tokens(self, rows: Int64, starts: Int64, counts: Int64) -> Int32:
        """The step's flat input. What was sampled in this row is taken from the device: it may not even
        be known here yet."""
        running = self._running
        on_device = running.is_decoding(rows)
        if on_device.all():
            return np.full(len(rows), FROM_DEVICE, np.int32)
        tokens = np.where(on_device, FROM_DEVICE, running.tokens[rows, starts]).astype(np.int32)
        if (counts == 1).all():
            return tokens
        return np.concatenate(
            [
                tokens[i : i + 1] if counts[i] == 1 else running.tokens[row, starts[i] : starts[i] + counts[i]]
                for i, row in enumerate(rows)
            ]
        )
