"""The loop: plan step N+1 while step N runs, then process the result of step N."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from freehold.config import EngineConfig
from freehold.contract.errors import Aborted, BadRequest, EngineStuck, FreeholdError, InvalidParameter
from freehold.contract.slices import finished
from freehold.contract.step import DraftCost, Engine, Step, StepResult, StepTiming
from freehold.contract.vocabulary import Vocabulary
from freehold.memory import AuditError, Memory
from freehold.memory.audit import recounting
from freehold.scheduler.admission import GrowthEstimate
from freehold.scheduler.chunk_budget import ChunkBudget
from freehold.scheduler.faults import is_broken
from freehold.scheduler.lifecycle import Lifecycle, Timeouts
from freehold.scheduler.loading import Loading
from freehold.scheduler.planner import Planner
from freehold.scheduler.queue import WaitingQueue
from freehold.scheduler.request import Finish, FinishKind, Request
from freehold.scheduler.results import Results, StepOutput
from freehold.scheduler.running import RunningTable
from freehold.scheduler.shares import Shares
from freehold.scheduler.speculation import DraftBudget
from freehold.scheduler.states import Event, RequestState
from freehold.scheduler.step_time import StepTime

IDLE_ITERATIONS_MAX = 100
TRANSFER_WAIT_S = 0.005
RESULT_WAIT_S = 0.05  # a longer step is waited for again, so that aborts and timeouts are handled meanwhile


class PauseMode(StrEnum):
    """What happens to running requests when generation is paused."""

    ABORT = "abort"  # they end
    RETRACT = "retract"  # they go back to the queue and give up their memory
    IN_PLACE = "in_place"  # they keep their rows


@dataclass(frozen=True)
class _InFlight:
    step: Step
    result: Future[StepResult]


class Scheduler:
    """Owns every decision. All methods are called by one thread.

    With overlap a step is submitted before the result of the previous one is known. A request that turns out to be
    finished is ended at once. The step in flight still computes tokens for it, into pages that stay in limbo until
    then, and those results are discarded.
    """

    def __init__(
        self,
        config: EngineConfig,
        memory: Memory,
        engine: Engine,
        vocabulary: Vocabulary,
        clock: Callable[[], float] = time.monotonic,
        draft_cost: DraftCost | None = None,
        timings: Sequence[StepTiming] = (),
    ):
        self.config = config
        self.memory = memory
        self.shares = Shares()
        self.queue = WaitingQueue(config.schedule_policy, config.max_overtaken, self.shares)
        self.running = RunningTable(memory.shape.row_count, memory.shape.token_limit)
        timeouts = Timeouts(config.waiting_timeout, config.running_timeout)
        self.lifecycle = Lifecycle(
            memory,
            self.queue,
            self.running,
            self.shares,
            vocabulary,
            config.max_queued_requests,
            clock,
            timeouts,
        )
        self.requests: dict[str, Request] = {}
        self.audit_error: AuditError | None = None
        self.paused: PauseMode | None = None
        self.draining = False  # submit nothing, so that the steps in flight become the last ones
        self.stuck: str | None = None  # what the engine has been waiting for too long
        self._weights_source: str | None = None  # of weights being loaded
        self._engine = engine
        drafts = None if draft_cost is None else DraftBudget(draft_cost, memory.shape.row_count)
        target = None if config.target_itl_ms is None else config.target_itl_ms / 1000
        chunks = ChunkBudget(config.chunked_prefill_size, target, StepTime(timings))
        self.results = Results(memory, self.running, self.lifecycle, vocabulary, chunks, drafts)
        self.loading = Loading(memory, self.lifecycle, chunks.time)
        self._planner = Planner(config, memory, self.queue, self.running, self.lifecycle, self.loading, chunks, drafts)
        self._in_flight: deque[_InFlight] = deque()
        self._progress_at = clock()  # when the step now oldest in flight became the oldest
        self._depth = 1 if config.disable_overlap_schedule else 2
        self._output = StepOutput()
        self._idle_iterations = 0

    # -- from outside -----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raise InvalidParameter or QueueFull, having changed nothing. A fault in looking it up in
        storage ends the request: the next output says so."""
        if request.id in self.requests:
            raise InvalidParameter("rid", f"request id {request.id} is already in flight")
        if request.timeout is None:
            request.timeout = self.config.request_timeout
        self.lifecycle.accept(request)
        self.requests[request.id] = request
        self.loading.prefetch(request, self.lifecycle.clock())

    def abort(self, request_id: str, message: str = "Aborted") -> bool:
        """End a request in any state. Return whether there was one. Its pages are freed now, or when the step that may
        touch them is done."""
        request = self.requests.get(request_id)
        if request is None or request.state is RequestState.ENDED:
            return False
        if request.state is RequestState.WAITING:
            message = "Abort in waiting queue"
        self.lifecycle.end(request, Finish(FinishKind.ABORT, error=Aborted(message)))
        return True

    def abort_all(self, message: str = "Aborted") -> None:
        for request_id in list(self.requests):
            self.abort(request_id, message)

    def pause(self, mode: PauseMode) -> None:
        """Stop computing once the steps in flight are done. Requests are accepted and wait. Raise EngineStuck if those
        steps never end, having changed nothing."""
        self.drain()
        self.paused = mode
        if mode is PauseMode.ABORT:
            self.abort_all()
        if mode is PauseMode.RETRACT:
            self._retract_all()

    def resume(self) -> None:
        """End a pause. Does nothing without one."""
        self.paused = None

    def update_weights(self, source: str) -> None:
        """Run `updating_weights` to its end."""
        finished(self.updating_weights(source))

    def updating_weights(self, source: str) -> Generator[float | None, None, None]:
        """Switch to other weights from the next step on. KV of the old weights is never found again. Running requests
        keep their output and recompute their KV, except those paused in place, which keep theirs. Raise BadRequest if
        the weights can't be loaded; the old ones stay.

        Loading can't be cancelled, so it has no timeout: nothing is computed before it ends. Yields the seconds for
        which there is nothing to do; `step` may be called then, and `stuck` says if loading exceeds the watchdog
        timeout. Raise EngineStuck if the steps in flight never end."""
        self.drain()
        loading = self._engine.load_weights(source)
        self._weights_source, self._progress_at = source, self.lifecycle.clock()
        try:
            while not loading.done():
                yield RESULT_WAIT_S
        finally:
            self._weights_source = None
        fingerprint = _loaded(loading, source)
        if self.paused is not PauseMode.IN_PLACE:
            self._retract_all()
        yield from self.memory.replacing_weights(fingerprint)

    def _retract_all(self) -> None:
        for row in self.running.order.tolist():
            self.lifecycle.retract(row, Event.PAUSED)

    def forget_session(self, name: str) -> None:
        """Close a session: free its tail. Its prefix stays cached as long as there is room."""
        self.memory.tails.forget(name)

    @property
    def has_work(self) -> bool:
        """Whether `step` would make progress."""
        pending = self._in_flight or self.lifecycle.ended or self._output.requests or self.memory.has_transfer_work
        return bool(pending or (self.requests and self.paused is None and self._weights_source is None))

    @property
    def growth(self) -> GrowthEstimate:
        """Admission's estimate of the growth of running requests."""
        return self._planner.admission.growth

    @property
    def in_flight_count(self) -> int:
        """Steps submitted whose results are not processed yet."""
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        """Whether no request holds or wants memory. Requests queued behind a pause don't count."""
        return not self._in_flight and len(self.running) == 0 and (self.paused is not None or not self.requests)

    def waits_for(self) -> str:
        """Return what an engine without progress is waiting for."""
        if self._weights_source is not None:
            return f"weights to be loaded from {self._weights_source}"
        if self.paused is not None:
            return f"generation to be continued (paused, mode {self.paused})"
        if self._in_flight:
            step = self._in_flight[0].step
            return f"the engine to complete step {step.number} with {int(step.counts.sum())} tokens"
        head = self.queue.peek()
        if head is None:
            return "requests"
        counts = self.memory.counts()
        return (
            f"room for request '{head.id}' of {len(head.tokens)} tokens beside {len(self.running)} running ones: "
            f"{counts.free} pages free, {counts.limbo} in limbo, {counts.tree} evictable, {counts.lease} leased, "
            f"{self.memory.leases.free_row_count} rows free"
        )

    # -- the loop -----------------------------------------------------------------------------------------

    def step(self) -> StepOutput:
        """Run one iteration: submit the next step, then process the result of the oldest one, if it comes soon.

        Even if the engine hangs, timed out and aborted requests are in the output; `stuck` says what an engine without
        progress is waiting for. The first call decides which thread moves pages.
        """
        self.memory.epochs.claim_thread()
        self.lifecycle.expire()
        self.memory.pass_time(self.lifecycle.clock())
        is_submitted = self._submit()
        if self._in_flight and (not is_submitted or len(self._in_flight) >= self._depth):
            self._take_result(RESULT_WAIT_S)
        if not is_submitted and not self._in_flight and self.has_work:
            self.memory.await_transfer(TRANSFER_WAIT_S)
        self._audit_if_due()
        self.stuck = self._why_stuck(is_submitted)
        return self._take_output()

    def _submit(self) -> bool:
        """Submit the next step. Return whether there was one. A held scheduler submits none."""
        is_held = self.paused is not None or self.draining or self._weights_source is not None
        if is_held or len(self._in_flight) >= self._depth:
            return False
        plan = self._planner.plan(len(self._in_flight))
        if isinstance(plan, Step):
            if not self._in_flight:
                self._progress_at = self.lifecycle.clock()
            self._in_flight.append(_InFlight(plan, self._engine.execute(plan)))
        return isinstance(plan, Step)

    def _why_stuck(self, is_submitted: bool) -> str | None:
        """Return what requests wait for if a step exceeds the watchdog timeout, or if many iterations computed and
        changed nothing. A later call may return None again."""
        if self._in_flight or self._weights_source is not None:
            self._idle_iterations = 0
            limit = self.config.watchdog_timeout
            is_late = self.lifecycle.clock() - self._progress_at > limit
            return f"no result for {limit:g} s: waiting for {self.waits_for()}" if is_late else None
        is_coming = self.memory.awaits_transfers or self.loading.is_hashing or not self.has_work
        if is_submitted or self._output.requests or self.lifecycle.ended or is_coming:
            self._idle_iterations = 0
            return None
        self._idle_iterations += 1
        if self._idle_iterations <= IDLE_ITERATIONS_MAX:
            return None
        return f"nothing has changed for {IDLE_ITERATIONS_MAX} iterations: waiting for {self.waits_for()}"

    def drain(self) -> None:
        """Process the results of all steps in flight; the next `step` delivers them. Raise EngineStuck if one does not
        come."""
        limit = self.config.watchdog_timeout
        while self._in_flight:
            if not self._take_result(limit):
                raise EngineStuck(f"no result for {limit:g} s: waiting for {self.waits_for()}")

    def _take_result(self, seconds: float) -> bool:
        """Return whether the oldest step ended within `seconds`."""
        done = self._in_flight[0]
        try:
            error = done.result.exception(seconds)
        except TimeoutError:
            return False
        self._in_flight.popleft()
        self._progress_at = self.lifecycle.clock()
        step = done.step
        self.memory.complete(step.number)
        # A row whose request has ended meanwhile has no owner until this step is done.
        live = np.flatnonzero(self.memory.leases.owner[step.rows])
        if error is not None:
            self.results.fail(step.rows[live], error)
        else:
            self.results.take(step, done.result.result(), live, self._output)
        return True

    def _take_output(self) -> StepOutput:
        output, self._output = self._output, StepOutput()
        output.ended, self.lifecycle.ended = self.lifecycle.ended, []
        for request in output.ended:
            del self.requests[request.id]
        return output

    def audit(self) -> None:
        """Recount all pages. Raise AuditError, and remember it: the engine is unhealthy from then on."""
        for _ in self.auditing():
            pass

    def recounting(self) -> Iterator[None]:
        """Recount what does not change while the engine runs. Raise AuditError as `audit` does."""
        return self._remembering(recounting(self.memory))

    def auditing(self) -> Iterator[None]:
        """Audit in slices of about a millisecond, for an idle engine. Start over if anything changes between slices."""
        return self._remembering(self.memory.auditing())

    def _remembering(self, audit: Iterator[None]) -> Iterator[None]:
        try:
            yield from audit
        except AuditError as error:
            self.audit_error = error
            raise

    def _audit_if_due(self) -> None:
        interval = self.config.audit_interval
        if interval and self.memory.epochs.submitted % interval == 0:
            self.audit()


def _loaded(loading: Future[bytes], source: str) -> bytes:
    """Return the fingerprint of the weights. Raise BadRequest if a library cannot read the files."""
    try:
        return loading.result()
    except FreeholdError as error:
        raise BadRequest(str(error), "model_path") from error
    except Exception as error:
        if is_broken(error):
            raise
        message = str(error) if source in str(error) else f"{source} can't be loaded: {error}"
        raise BadRequest(message, "model_path") from error
