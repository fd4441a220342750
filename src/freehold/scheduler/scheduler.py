"""The loop: plan step N+1 while step N runs, take in what step N gave."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from freehold.arrays import Int32, Int64
from freehold.config import EngineConfig
from freehold.memory import AuditError, Memory
from freehold.scheduler.lifecycle import Lifecycle
from freehold.scheduler.planner import NoStep, Planner
from freehold.scheduler.queue import WaitingQueue
from freehold.scheduler.request import Finish, FinishKind, Request, RequestState
from freehold.scheduler.running import RunningTable
from freehold.scheduler.vocabulary import Vocabulary, find_stop
from freehold.step import Engine, Step, StepResult, TokenLogprobs


@dataclass(frozen=True)
class StepOutput:
    """What one iteration brought: `tokens[i]` for `requests[i]`, then the requests that ended."""

    requests: list[Request] = field(default_factory=list[Request])
    tokens: list[int] = field(default_factory=list[int])
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    ended: list[Request] = field(default_factory=list[Request])


@dataclass(frozen=True)
class _InFlight:
    step: Step
    owners: Int64  # of the rows, when the step was submitted
    result: Future[StepResult]


class Scheduler:
    """Owns every decision. All methods are called by one thread.

    With overlap a step is submitted before the result of the one before it is known. A request that
    turns out to have finished is ended at once; the step in flight still computes a token for it, into
    pages that stay in limbo until then, and the result finds nobody to go to.
    """

    def __init__(
        self,
        config: EngineConfig,
        memory: Memory,
        engine: Engine,
        vocabulary: Vocabulary,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = config
        self.memory = memory
        self.vocabulary = vocabulary
        self.queue = WaitingQueue(config.schedule_policy)
        self.running = RunningTable(memory.shape.row_count, memory.shape.token_limit)
        self.lifecycle = Lifecycle(
            memory, self.queue, self.running, vocabulary.eos_tokens, config.max_queued_requests, clock
        )
        self.requests: dict[str, Request] = {}
        self.audit_error: AuditError | None = None
        self.token_count = 0  # sampled since the start
        self._engine = engine
        self._planner = Planner(config, memory, self.queue, self.running, self.lifecycle)
        self._in_flight: deque[_InFlight] = deque()
        self._depth = 1 if config.disable_overlap_schedule else 2

    # -- from outside -----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises Refused, QueueFull or ValueError (the id is in use); then nothing has
        changed."""
        if request.id in self.requests:
            raise ValueError(f"request id '{request.id}' is already in flight")
        self.lifecycle.accept(request)
        self.requests[request.id] = request

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is -> whether there was one. Its pages are given back now, or when
        the step that may touch them is done."""
        request = self.requests.get(request_id)
        if request is None or request.state is RequestState.ENDED:
            return False
        self.lifecycle.end(request, Finish(FinishKind.ABORT, message="aborted"))
        return True

    def abort_all(self) -> None:
        for request_id in list(self.requests):
            self.abort(request_id)

    def flush_cache(self) -> int:
        """Forget all prefixes that nobody uses -> pages given back."""
        return self.memory.tree.flush()

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._in_flight or self.lifecycle.ended)

    def step(self) -> StepOutput:
        """One iteration: submit the next step, then take in the result of the oldest one."""
        plan = self._planner.plan(len(self._in_flight))
        if isinstance(plan, Step):
            owners = self.memory.leases.owner[plan.rows]
            self._in_flight.append(_InFlight(plan, owners, self._engine.execute(plan)))
        output = StepOutput()
        if self._in_flight and (isinstance(plan, NoStep) or len(self._in_flight) >= self._depth):
            output = self._take_result(self._in_flight.popleft())
        ended, self.lifecycle.ended = self.lifecycle.ended, []
        output.ended.extend(ended)
        for request in ended:
            del self.requests[request.id]
        self._audit_if_due()
        return output

    def audit(self) -> None:
        """Recount all pages. Raises AuditError, and remembers it: the engine is unwell from then on."""
        try:
            self.memory.audit()
        except AuditError as error:
            self.audit_error = error
            raise

    def _audit_if_due(self) -> None:
        interval = self.config.audit_interval
        if interval and self.memory.epochs.submitted % interval == 0:
            self.audit()

    # -- results ----------------------------------------------------------------------------------------

    def _take_result(self, done: _InFlight) -> StepOutput:
        step = done.step
        error = done.result.exception()
        self.memory.complete(step.number)
        # A row may have a new tenant by now, or none.
        live = np.flatnonzero(self.memory.leases.owner[step.rows] == done.owners)
        if error is not None:
            self._fail(step.rows[live], error)
            return StepOutput()
        result = done.result.result()
        self.memory.leases.commit(step.rows[live], step.counts[live])
        self._publish_prompts(step, live)
        sampled = live[step.samples[live]]
        return self._take_tokens(step.rows[sampled], result.tokens[sampled], self._logprobs(result, sampled))

    def _fail(self, rows: Int64, error: BaseException) -> None:
        """The step did not complete: nothing was committed, and those who were in it hear of it."""
        for row in rows:
            request = self.running.request(int(row))
            message = f"the engine failed: {type(error).__name__}: {error}"
            self.lifecycle.end(request, Finish(FinishKind.ERROR, message=message))

    def _publish_prompts(self, step: Step, live: Int64) -> None:
        """Share each chunk as soon as it is written; decoded tokens are shared when the request ends."""
        rows = step.rows[live]
        fresh = step.starts[live] < self.running.prefill_end[rows]
        for row in rows[fresh]:
            request = self.running.request(int(row))
            assert request.lease is not None
            self.memory.publish(request.lease, self.running.known_tokens(int(row)), request.priority)

    def _logprobs(self, result: StepResult, sampled: Int64) -> dict[int, TokenLogprobs]:
        if not result.logprobs:
            return {}
        return {i: result.logprobs[int(at)] for i, at in enumerate(sampled) if int(at) in result.logprobs}

    def _take_tokens(self, rows: Int64, tokens: Int32, logprobs: dict[int, TokenLogprobs]) -> StepOutput:
        running = self.running
        running.tokens[rows, running.length[rows]] = tokens
        running.length[rows] += 1
        running.pending[rows] -= 1
        self.token_count += len(rows)
        requests = [running.request(row) for row in rows.tolist()]
        self._note_first_tokens(rows, requests)
        output = StepOutput(requests, tokens.tolist(), logprobs)
        length = running.length[rows]
        may_stop = length >= running.min_length[rows]
        eos = self.vocabulary.is_eos(tokens) & may_stop & ~running.ignore_eos[rows]
        full = length >= running.max_length[rows]
        # In one step a stop string beats a stop token, which beats the length limit.
        for i in np.flatnonzero(eos | full | running.watched[rows]):
            request, token = requests[i], output.tokens[i]
            finish = self._watch(request, token, bool(may_stop[i]), logprobs.get(int(i)))
            if finish is None and eos[i]:
                finish = Finish(FinishKind.STOP, token)
            if finish is None and full[i]:
                finish = Finish(FinishKind.LENGTH)
            if finish is not None:
                self.lifecycle.end(request, finish)
        return output

    def _note_first_tokens(self, rows: Int64, requests: list[Request]) -> None:
        first = self.running.length[rows] == self.running.prefill_end[rows] + 1
        if first.any():
            now = self.lifecycle.clock()
            for i in np.flatnonzero(first):
                requests[i].state = RequestState.RUNNING
                requests[i].first_token = requests[i].first_token or now

    def _watch(self, request: Request, token: int, may_stop: bool, logprobs: TokenLogprobs | None) -> Finish | None:
        """The request's own stops, and its logprobs."""
        params = request.params
        if logprobs is not None:
            request.logprobs.append(logprobs)
        if params.stop:
            stops = tuple(stop.encode() for stop in params.stop)
            piece = self.vocabulary.token_bytes[token] if token < self.vocabulary.size else b""
            found, request.stop_tail = find_stop(request.stop_tail, piece, stops)
            if found is not None and may_stop:
                return Finish(FinishKind.STOP, params.stop[found])
            if found is not None:
                request.stop_tail = b""
        if token in params.stop_token_ids and may_stop and not params.ignore_eos:
            return Finish(FinishKind.STOP, token)
        return None
