"""Which sequences run in the next step, with how many tokens."""

from __future__ import annotations

from enum import Enum, auto

import numpy as np

from freehold.arrays import Int32, Int64
from freehold.config import EngineConfig
from freehold.memory import Match, Memory
from freehold.memory.lease import pages_to_cover
from freehold.scheduler.lifecycle import Lifecycle
from freehold.scheduler.queue import WaitingQueue
from freehold.scheduler.request import Finish, FinishKind, Request
from freehold.scheduler.running import RunningTable
from freehold.step import FROM_DEVICE, Step

PASSED_OVER_MAX = 64  # waiting requests looked at and left waiting in one pass


class NoStep(Enum):
    """Why there is nothing to submit."""

    IDLE = auto()  # nobody has tokens to compute
    BLOCKED = auto()  # the steps in flight must complete first


class _Admission(Enum):
    ADMITTED = auto()
    SHARES = auto()  # somebody is computing the same prefix
    NO_ROOM = auto()


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
    ):
        self._memory = memory
        self._queue = queue
        self._running = running
        self._lifecycle = lifecycle
        self._chunk = config.chunked_prefill_size
        self._retract_interval = config.forward_retract_interval
        self._steps_since_retraction = 0
        self.growth = GrowthEstimate()

    def plan(self, in_flight: int) -> Step | NoStep:
        """The next step, with its pages allocated and its rows marked; or why there is none.

        Requests are retracted only while nothing is in flight: a step's result is never thrown away.
        """
        if self._must_retract():
            if in_flight:
                return NoStep.BLOCKED
            self._retract_for_test()
        rows, counts = self._continue()
        fits = self._make_room(rows, counts)
        if not fits and in_flight:
            return NoStep.BLOCKED
        if not fits:
            rows, counts = self._retract_until_it_fits()
        self._memory.leases.extend(rows, self._running.scheduled[rows] + counts)
        if fits:
            rows, counts = self._admit(rows, counts)
        if len(rows) == 0:
            return NoStep.BLOCKED if in_flight else NoStep.IDLE
        return self._step(rows, counts)

    # -- requests that have a row ---------------------------------------------------------------------

    def _continue(self) -> tuple[Int64, Int64]:
        """Rows that go on, decoding ones first, and their token counts."""
        rows = self._running.active()
        todo = self._running.todo(rows)
        decoding = todo == 1
        chunks, sizes = rows[~decoding], todo[~decoding]
        if len(chunks):
            before = np.cumsum(sizes) - sizes
            sizes = np.clip(self._chunk - before, 0, sizes)
            chunks, sizes = chunks[sizes > 0], sizes[sizes > 0]
        ones = np.ones(int(decoding.sum()), np.int64)
        return np.concatenate([rows[decoding], chunks]), np.concatenate([ones, sizes])

    def _make_room(self, rows: Int64, counts: Int64) -> bool:
        leases = self._memory.leases
        needed = leases.page_counts_to_extend(rows, self._running.scheduled[rows] + counts)
        return self._memory.make_room(int(needed.sum()))

    def _retract_until_it_fits(self) -> tuple[Int64, Int64]:
        """Free memory by sending the least important requests back to the queue. The most important one
        stays, so there is always progress; if it cannot go on even alone, it is ended."""
        while True:
            rows, counts = self._continue()
            if self._make_room(rows, counts):
                return rows, counts
            victim = self._victim()
            if len(self._running) == 1:
                self._end_exhausted(self._running.request(victim))
            else:
                self.growth.ran_out()
                self._lifecycle.retract(victim)

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
        self._steps_since_retraction = 0
        order, running = self._running.order, self._running
        moved = order[running.length[order] > running.prefill_end[order]]
        if len(moved):
            self._lifecycle.retract(min(moved.tolist(), key=lambda row: running.request(row).retractions))

    # -- requests that wait -----------------------------------------------------------------------------

    def _admit(self, rows: Int64, counts: Int64) -> tuple[Int64, Int64]:
        """Give what is left of the budget to waiting requests."""
        budget = self._chunk - int(counts[counts > 1].sum())
        if not len(self._queue) or budget <= 0:
            return rows, counts
        self._queue.rank_by_match(lambda request: self._match(request).length)
        sharing = self._pages_being_computed()
        reserved = self._reserved_page_count()
        passed_over: list[Request] = []
        new_rows: list[int] = []
        new_counts: list[int] = []
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
            new_rows.append(request.lease.row)
            new_counts.append(count)
            budget -= count
            reserved += self._growth_page_count(np.array([request.lease.row]))
        for request in passed_over:
            self._queue.push(request)
        return (
            np.concatenate([rows, np.array(new_rows, np.int64)]),
            np.concatenate([counts, np.array(new_counts, np.int64)]),
        )

    def _try_admit(
        self, request: Request, budget: int, reserved: int, sharing: set[tuple[str, int, bytes]]
    ) -> tuple[_Admission, int]:
        memory, running = self._memory, self._running
        tokens = request.tokens
        match = memory.match(request.namespace, tokens)
        key = memory.tree.next_page_key(match, tokens)
        if key is not None and key in sharing:
            return _Admission.SHARES, 0
        if not self._fits_beside(request, len(tokens), match, reserved):
            return _Admission.NO_ROOM, 0
        row = self._lifecycle.start(request, match)
        count = min(len(tokens) - match.length, budget)
        target = np.array([match.length + count], np.int64)
        where = np.array([row], np.int64)
        if not memory.make_room(int(memory.leases.page_counts_to_extend(where, target).sum())):
            self._lifecycle.unstart(row)
            return _Admission.NO_ROOM, 0
        memory.leases.extend(where, target)
        self._lifecycle.announce(row)
        running.scheduled[row] = match.length
        if key is not None:
            sharing.add(key)
        return _Admission.ADMITTED, count

    def _match(self, request: Request) -> Match:
        return self._memory.match(request.namespace, request.tokens)

    def _fits_beside(self, request: Request, length: int, match: Match, reserved: int) -> bool:
        """Whether the request's known tokens, and its estimated share of output, can be had without
        taking what the running requests are expected to need. The first request always fits."""
        if len(self._running) == 0:
            return True
        memory = self._memory
        ahead = int(self.growth.share * (self._lifecycle.max_length(request) - length)) + 1
        needed = -(-(length + ahead) // memory.page_size) - match.length // memory.page_size
        taken = memory.tree.unheld_page_count(match)
        return needed + reserved + taken <= memory.reachable_page_count

    def _reserved_page_count(self) -> int:
        return self._growth_page_count(self._running.order)

    def _growth_page_count(self, rows: Int64) -> int:
        """Pages that `rows` are expected to need beyond those they have."""
        running, memory = self._running, self._memory
        length = running.length[rows]
        ahead = (self.growth.share * (running.max_length[rows] - length)).astype(np.int64)
        have = memory.leases.allocated[rows] // memory.page_size
        wanted = pages_to_cover(length + ahead, memory.page_size) - have
        return int(np.maximum(wanted, 0).sum())

    def _pages_being_computed(self) -> set[tuple[str, int, bytes]]:
        """The next unpublished page of each prompt that is being computed: a request that would compute
        the same page waits for it instead."""
        running, leases, size = self._running, self._memory.leases, self._memory.page_size
        rows = running.order[leases.committed[running.order] < running.prefill_end[running.order]]
        keys: set[tuple[str, int, bytes]] = set()
        if not self._memory.shape.prefix_cache:
            return keys
        for row in rows.tolist():
            request = running.request(row)
            lease = request.lease
            start = int(leases.shared[row])
            assert lease is not None
            if start + size <= running.prefill_end[row]:
                serial = lease.node.serial if start else 0
                page = running.tokens[row, start : start + size].tobytes()
                keys.add((request.namespace, serial, page))
        return keys

    # -- the step ---------------------------------------------------------------------------------------

    def _step(self, rows: Int64, counts: Int64) -> Step:
        running, memory = self._running, self._memory
        starts = running.scheduled[rows]
        samples = starts + counts == running.length[rows] + running.pending[rows]
        number = memory.epochs.submit()
        step = Step(
            number=number,
            rows=rows,
            starts=starts,
            counts=counts,
            tokens=self._input_tokens(rows, starts, counts),
            samples=samples,
            row_starts=self._lifecycle.row_starts,
            page_updates=memory.leases.take_updates(),
        )
        self._lifecycle.row_starts = []
        running.scheduled[rows] = starts + counts
        running.pending[rows] += samples
        memory.leases.submit(rows, number)
        self.growth.went_well()
        self._steps_since_retraction += 1
        return step

    def _input_tokens(self, rows: Int64, starts: Int64, counts: Int64) -> Int32:
        """The step's flat input. What was sampled in this row is taken from the device: it may not even
        be known here yet."""
        running = self._running
        on_device = starts >= running.prefill_end[rows]
        tokens = np.where(on_device, FROM_DEVICE, running.tokens[rows, starts]).astype(np.int32)
        if (counts == 1).all():
            return tokens
        return np.concatenate(
            [
                tokens[i : i + 1] if counts[i] == 1 else running.tokens[row, starts[i] : starts[i] + counts[i]]
                for i, row in enumerate(rows)
            ]
        )
