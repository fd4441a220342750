"""Which sequences run in the next step, with how many tokens."""

from __future__ import annotations

from enum import Enum, auto

import numpy as np

from freehold.config import EngineConfig
from freehold.errors import KVMemoryExhausted
from freehold.memory import Memory
from freehold.scheduler.admission import Admission
from freehold.scheduler.batch import Batch
from freehold.scheduler.chunk_budget import ChunkBudget
from freehold.scheduler.lifecycle import Lifecycle
from freehold.scheduler.preemption import Preemption
from freehold.scheduler.queue import WaitingQueue
from freehold.scheduler.request import Finish, FinishKind, Request
from freehold.scheduler.running import RunningTable
from freehold.scheduler.speculation import DraftBudget
from freehold.scheduler.states import Event
from freehold.step import Step


class NoStep(Enum):
    """Why there is nothing to submit."""

    IDLE = auto()  # nobody has tokens to compute
    BLOCKED = auto()  # the steps in flight must complete first


class Planner:
    """Plans one step at a time under a budget: one token for each decoding row, and as many
    tokens of prompts as `ChunkBudget` allows, of as many requests as they come from."""

    def __init__(
        self,
        config: EngineConfig,
        memory: Memory,
        queue: WaitingQueue,
        running: RunningTable,
        lifecycle: Lifecycle,
        chunks: ChunkBudget,
        drafts: DraftBudget | None = None,
    ):
        self._memory = memory
        self._queue = queue
        self._running = running
        self._lifecycle = lifecycle
        self._drafts = drafts
        self._chunks = chunks
        self.admission = Admission(memory, queue, running, lifecycle, drafts)
        threshold = config.priority_scheduling_preemption_threshold
        self._preemption = None if threshold is None else Preemption(memory, queue, running, self.admission, threshold)
        self._retract_interval = config.forward_retract_interval
        self._steps_since_retraction = 0

    def plan(self, in_flight: int) -> Step | NoStep:
        """The next step, with its pages allocated and its rows marked; or why there is none.

        Requests are retracted only while nothing is in flight: a step's result is never thrown away.
        """
        is_due = self._is_retraction_due()
        victim = None if self._preemption is None else self._preemption.victim()
        if is_due or victim is not None:
            if in_flight:
                return NoStep.BLOCKED
            if is_due:
                self._retract_for_test()
            elif victim is not None:
                self._lifecycle.retract(victim, Event.PREEMPTED)
        batch = self._continue()
        fits = self._make_room(batch)
        if not fits and np.count_nonzero(batch.drafts):
            batch = self._continue(may_draft=False)
            fits = self._make_room(batch)
        if not fits and in_flight:
            return NoStep.BLOCKED
        if not fits:
            batch = self._retract_until_it_fits()
        self._memory.leases.extend(batch.rows, batch.targets)
        if fits and len(self._queue):
            chunk = self._chunks.tokens(int(np.count_nonzero(batch.decodes)))
            for admitted in self.admission.admit(batch, chunk):
                batch = batch + admitted
        if len(batch.rows) == 0:
            return NoStep.BLOCKED if in_flight else NoStep.IDLE
        return self._step(batch)

    # -- requests that have a row ---------------------------------------------------------------------

    def _continue(self, may_draft: bool = True) -> Batch:
        """Rows that go on, decoding ones first."""
        running = self._running
        rows = running.active()
        todo = running.todo(rows)
        decoder_count = len(rows) - int(np.count_nonzero(todo > 0))
        counts = np.ones(len(rows), np.int64)
        if decoder_count < len(rows):
            chunks, sizes = rows[todo > 0], todo[todo > 0]
            sizes = np.clip(self._chunks.tokens(decoder_count) - (sizes.cumsum() - sizes), 0, sizes)
            rows = np.concatenate([rows[todo <= 0], chunks[sizes > 0]])
            counts = np.concatenate([counts[:decoder_count], sizes[sizes > 0]])
        drafts = np.zeros(len(rows), np.int64)
        if may_draft and self._drafts is not None and decoder_count:
            drafts[:decoder_count] = self._drafts.choose(rows[:decoder_count], int(counts.sum()))
        return running.batch(rows, counts, drafts)

    def _make_room(self, batch: Batch, may_unpin: bool = False) -> bool:
        return self._memory.make_room(batch.rows, batch.targets, may_unpin)

    def _retract_until_it_fits(self) -> Batch:
        """Free memory by sending the least important requests back to the queue. The most important one
        stays, so there is always progress; if it cannot go on even alone, it is ended."""
        while True:
            batch = self._continue(may_draft=False)
            if self._make_room(batch, may_unpin=len(self._running) == 1):
                return batch
            victim = self._victim()
            if len(self._running) == 1:
                self._end_exhausted(self._running.request(victim))
            else:
                self.admission.growth.ran_out()
                self._lifecycle.retract(victim, Event.RETRACTED)

    def _end_exhausted(self, request: Request) -> None:
        message = (
            f"the request alone has filled the KV memory of {self._memory.capacity_tokens} tokens: "
            "ask for less output, or start with more pages (num_pages, kv_cache_memory_bytes)"
        )
        self._lifecycle.end(request, Finish(FinishKind.ERROR, error=KVMemoryExhausted(message)))

    def _victim(self) -> int:
        return int(self._running.least_important_first()[0])

    def _is_retraction_due(self) -> bool:
        return 0 < self._retract_interval <= self._steps_since_retraction and len(self._running) > 0

    def _retract_for_test(self) -> None:
        """The test switch `forward_retract_interval`: everybody's turn comes. Only a request that has
        moved on since it was admitted is retracted, or small chunks would never get anywhere."""
        self._steps_since_retraction = 0
        order, running = self._running.order, self._running
        moved = order[running.length[order] > running.prefill_end[order]]
        if len(moved):
            victim = min(moved.tolist(), key=lambda row: running.request(row).retractions)
            self._lifecycle.retract(victim, Event.RETRACTED)

    # -- the step ---------------------------------------------------------------------------------------

    def _step(self, batch: Batch) -> Step:
        running, memory = self._running, self._memory
        rows = batch.rows
        samples = batch.starts + batch.counts >= running.prefill_end[rows]
        number = memory.epochs.submit()
        step = Step(
            number=number,
            rows=rows,
            starts=batch.starts,
            counts=batch.counts,
            decodes=batch.decodes,
            samples=samples,
            drafts=batch.drafts,
            row_starts=self._lifecycle.row_starts,
            page_updates=memory.leases.take_updates(),
        )
        self._lifecycle.row_starts = []
        running.submit(batch, samples)
        memory.leases.submit(rows, number)
        self.admission.growth.went_well()
        self._steps_since_retraction += 1
        return step
