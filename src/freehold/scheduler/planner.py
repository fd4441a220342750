"""Which sequences run in the next step, with how many tokens."""

from __future__ import annotations

from enum import Enum, auto

import numpy as np

from freehold.config import EngineConfig
from freehold.contract.arrays import Int64
from freehold.contract.errors import KVMemoryExhausted
from freehold.contract.step import Step
from freehold.memory import Memory
from freehold.scheduler.admission import Admission
from freehold.scheduler.batch import Batch
from freehold.scheduler.chunk_budget import ChunkBudget, PromptBudget
from freehold.scheduler.fair_steps import FairSteps
from freehold.scheduler.lifecycle import Lifecycle
from freehold.scheduler.loading import Loading
from freehold.scheduler.preemption import Preemption
from freehold.scheduler.queue import WaitingQueue
from freehold.scheduler.request import Finish, FinishKind, Request
from freehold.scheduler.running import RunningTable
from freehold.scheduler.speculation import DraftBudget
from freehold.scheduler.states import Event


class NoStep(Enum):
    """Why there is nothing to submit."""

    IDLE = auto()  # no request has tokens to compute
    BLOCKED = auto()  # steps or transfers in flight must complete first


class Planner:
    """Plans one step at a time under a budget: one token for each decoding row, and as many prompt tokens as
    `ChunkBudget` allows, from any number of requests. Competing clients share both (`FairSteps`)."""

    def __init__(
        self,
        config: EngineConfig,
        memory: Memory,
        queue: WaitingQueue,
        running: RunningTable,
        lifecycle: Lifecycle,
        loading: Loading,
        chunks: ChunkBudget,
        drafts: DraftBudget | None = None,
    ):
        self._memory = memory
        self._queue = queue
        self._running = running
        self._lifecycle = lifecycle
        self._drafts = drafts
        self._chunks = chunks
        self.admission = Admission(memory, queue, running, lifecycle, drafts, loading)
        threshold = config.priority_scheduling_preemption_threshold
        self._preemption = Preemption(memory, queue, running, lifecycle.shares, self.admission, threshold)
        self._retract_interval = config.forward_retract_interval
        self._shares = lifecycle.shares
        self._fair = FairSteps(self._shares, queue, running, chunks.time, config.fair_decode_rows)
        self._steps_since_retraction = 0

    def plan(self, in_flight: int) -> Step | NoStep:
        """Return the next step, with its pages allocated and its rows marked; or why there is none.

        Requests are retracted only while nothing is in flight, so that no result is thrown away.
        """
        is_due = self._is_retraction_due()
        victim = self._preemption.victim()
        if is_due or victim is not None:
            if in_flight:
                return NoStep.BLOCKED
            if victim is not None:
                self._lifecycle.retract(victim, Event.PREEMPTED)
            else:
                self._retract_for_test()
        self._memory.leases.slide(self._running.order)
        batch, budget = self._continue()
        fits = self._make_room(batch)
        if not fits and np.count_nonzero(batch.drafts):
            batch, budget = self._continue(may_draft=False)
            fits = self._make_room(batch)
        if not fits and in_flight:
            return NoStep.BLOCKED
        if not fits:
            batch = self._retract_until_it_fits()
        if batch is None:
            return NoStep.BLOCKED
        self._memory.leases.extend(batch.rows, batch.targets, batch.decodes)
        if fits and len(self._queue):
            for admitted in self.admission.admit(budget):
                batch = batch + admitted
        if len(batch.rows) == 0:
            return NoStep.BLOCKED if in_flight else NoStep.IDLE
        return self._step(batch)

    # -- requests that have a row ---------------------------------------------------------------------

    def _continue(self, may_draft: bool = True) -> tuple[Batch, PromptBudget]:
        """Return the rows that continue, decoding ones first; and the budget left for other prompts."""
        running = self._running
        rows = running.active()
        todo = running.todo(rows)
        is_prompt = todo > 0
        prompts, todo = rows[is_prompt], todo[is_prompt]
        if len(prompts):
            rows = rows[~is_prompt]
        now = self._lifecycle.clock()
        is_contested = self._fair.is_contested(now)
        if is_contested:
            rows = self._fair.decoding(rows, prompts, now)
        decoder_count = len(rows)
        counts = np.ones(decoder_count, np.int64)
        tokens, waiting = self._chunks.tokens(decoder_count), self.admission.candidates()
        together = self._chunks.together() if len(prompts) + waiting > 1 else None
        budget = self._fair.prompts(tokens, together, prompts) if is_contested else PromptBudget(tokens, None, together)
        if len(prompts):
            sizes = self._chunk_sizes(prompts, todo, budget, waiting > 0)
            rows = np.concatenate([rows, prompts[sizes > 0]])
            counts = np.concatenate([counts, sizes[sizes > 0]])
        drafts = np.zeros(len(rows), np.int64)
        if may_draft and self._drafts is not None and decoder_count:
            drafts[:decoder_count] = self._drafts.choose(rows[:decoder_count], int(counts.sum()))
        return running.batch(rows, counts, drafts), budget

    def _chunk_sizes(self, rows: Int64, todo: Int64, budget: PromptBudget, somebody_waits: bool) -> Int64:
        """Return how many of the `todo` [n] prompt tokens of `rows` [n] the next step computes. Among equal priorities
        the shortest remaining prompt goes first, so that short turns need not wait for long prompts. The earliest
        prompt gets half of the step, so it is never overtaken indefinitely; if it is long, the other half is for
        others."""
        running = self._running
        sizes, clients = np.zeros(len(rows), np.int64), running.client[rows].tolist()

        def give(i: int, wanted: int) -> None:
            tokens = budget.offer(clients[i], wanted)
            budget.spend(clients[i], tokens)
            sizes[i] += tokens

        first = int(np.lexsort((running.arrival[rows], -running.priority[rows]))[0])
        give(first, min(int(todo[first]), max(budget.together // 2, 1)))
        for i in np.lexsort((running.arrival[rows], todo, -running.priority[rows])).tolist():
            if not (somebody_waits and todo[i] > budget.together):
                give(i, int(todo[i] - sizes[i]))
        return sizes

    def _make_room(self, batch: Batch, may_unpin: bool = False) -> bool:
        return self._memory.room.make(batch.rows, batch.targets, batch.decodes, may_unpin)

    def _retract_until_it_fits(self) -> Batch | None:
        """Retract the least important requests until the rest fits. The most important one stays, so there is always
        progress; if even it alone does not fit, it is ended. Return None if evicted pages must be copied first."""
        while True:
            batch, _ = self._continue(may_draft=False)
            if self._make_room(batch, may_unpin=len(self._running) == 1):
                return batch
            if self._memory.room.is_returning:
                return None
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
        """Retract the least retracted request, for the test switch `forward_retract_interval`. Requests without a token
        since admission are skipped, or small chunks would never make progress."""
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
            page_updates=memory.leases.page_tables.take_updates(),
        )
        self._lifecycle.row_starts = []
        self._shares.charge(running.client[rows], batch.decodes, batch.counts)
        self._fair.submitted()
        running.submit(batch, samples)
        memory.leases.submit(rows, number)
        self.admission.growth.went_well()
        self._steps_since_retraction += 1
        return step
