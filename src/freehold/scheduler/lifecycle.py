"""The life of a request: admitted, retracted, ended. One routine handles every kind of end."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from weakref import ref

from freehold.contract.errors import InvalidParameter, QueueFull, TimedOut
from freehold.contract.step import RowStart
from freehold.contract.vocabulary import Vocabulary
from freehold.contract.whole import is_whole
from freehold.memory import Lease, Memory
from freehold.scheduler.faults import fault_of_one
from freehold.scheduler.queue import WaitingQueue
from freehold.scheduler.request import PROGRESS_TOKENS, Finish, FinishKind, Request
from freehold.scheduler.running import RunningTable
from freehold.scheduler.shares import Shares
from freehold.scheduler.states import Event, RequestState

STALE_MAX = 1024


class Deadline(StrEnum):
    """Which timeout expired."""

    WHOLE = "after"
    WAITING = "in the waiting queue after"
    RUNNING = "running after"


@dataclass(frozen=True)
class Timeouts:
    """Limits in seconds for waiting to be scheduled, and for running; None is no limit."""

    waiting: float | None = None
    running: float | None = None


def _is_alive(request: Request | None) -> bool:
    return request is not None and request.state is not RequestState.ENDED


class Lifecycle:
    """Moves requests between queue, rows and the end. Independent of steps."""

    def __init__(
        self,
        memory: Memory,
        queue: WaitingQueue,
        running: RunningTable,
        shares: Shares,
        vocabulary: Vocabulary,
        queue_limit: int,
        clock: Callable[[], float] = time.monotonic,
        timeouts: Timeouts = Timeouts(),
    ):
        self.memory = memory
        self.queue = queue
        self.running = running
        self.shares = shares
        self.clock = clock
        self.retraction_count = 0
        self.row_starts: list[RowStart] = []  # for the next step
        self.ended: list[Request] = []  # since the last output
        self._deadlines: list[tuple[float, int, Deadline, float, ref[Request]]] = []
        self._deadline_limit = STALE_MAX  # entries at which those of ended requests are dropped
        self._timeouts = timeouts
        self._vocabulary = vocabulary
        self._queue_limit = queue_limit
        self._arrivals = 0

    def accept(self, request: Request) -> None:
        """Queue a new request. Raise InvalidParameter or QueueFull, having changed nothing."""
        self.check_fits(request)
        request.watch_for_stops()
        # One client must not fill the queue for others: a client without requests gets twice the limit.
        limit = self._queue_limit if request.client in self.shares else 2 * self._queue_limit
        if len(self.queue) >= limit:
            raise QueueFull(f"{len(self.queue)} requests are waiting, the limit is {self._queue_limit}")
        self._arrivals += 1
        request.order = self._arrivals
        request.client_number = self.shares.join(request.client)
        request.arrival = request.arrival or self.clock()  # kept if it waited elsewhere
        request.state_since = self.clock()
        self.queue.push(request)
        self._set_deadline(request, Deadline.WHOLE, request.timeout, request.arrival)
        self._set_deadline(request, Deadline.WAITING, self._timeouts.waiting, request.arrival)

    def _set_deadline(self, request: Request, kind: Deadline, seconds: float | None, since: float) -> None:
        if seconds is None:
            return
        # The weak reference lets an ended request be freed.
        heapq.heappush(self._deadlines, (since + seconds, request.order, kind, seconds, ref(request)))
        if len(self._deadlines) > self._deadline_limit:
            self._deadlines = [entry for entry in self._deadlines if _is_alive(entry[4]())]
            heapq.heapify(self._deadlines)
            self._deadline_limit = 2 * len(self._deadlines) + STALE_MAX

    def expire(self) -> None:
        """End the requests whose timeout expired."""
        while self._deadlines and self._deadlines[0][0] <= self.clock():
            _, _, kind, seconds, reference = heapq.heappop(self._deadlines)
            request = reference()
            if request is None:
                continue
            has_begun = request.first_scheduled is not None
            if request.state is RequestState.ENDED or (kind is Deadline.WAITING and has_begun):
                continue
            self.end(request, Finish(FinishKind.TIMEOUT, error=TimedOut(f"timed out {kind.value} {seconds:g} s")))

    def max_length(self, request: Request) -> int:
        """Return prompt plus output tokens at which the request is finished. Without max_tokens: what fits."""
        token_limit = self.memory.shape.token_limit
        if request.params.max_tokens is None:
            return min(token_limit, self.memory.capacity_tokens + 1)
        return min(token_limit, len(request.prompt) + request.params.max_tokens)

    def check_fits(self, request: Request) -> None:
        """Raise InvalidParameter if the request cannot be served even alone."""
        params, prompt = request.params, len(request.prompt)
        limit, capacity = self.memory.shape.token_limit, self.memory.capacity_tokens
        request.check_numbers()
        for token in params.logprob_token_ids:
            if not is_whole(token, 0, self._vocabulary.size - 1):
                raise InvalidParameter("logprob_token_ids", f"token id {token} is outside the vocabulary")
        if prompt == 0:
            raise InvalidParameter("prompt", "the prompt must have at least one token")
        if prompt >= limit:
            raise InvalidParameter(
                "prompt",
                f"the prompt has {prompt} tokens, the maximum context length is {limit} tokens including output",
            )
        # The last token sampled needs no KV.
        may_stop = not params.ignore_eos or params.stop or params.stop_regex or params.constraint
        certain = params.min_tokens if may_stop else params.max_tokens
        needed = prompt + max(certain or 1, 1) - 1
        if needed > capacity:
            raise InvalidParameter(
                "max_tokens" if prompt <= capacity else "prompt",
                f"the request needs KV memory for {needed} tokens, the whole pool holds {capacity}: "
                "shorten it, or start with more pages (num_pages, kv_cache_memory_bytes)",
            )

    def start(self, request: Request, lease: Lease) -> None:
        """Admit a request: give it the lease's row, and announce it to the engine with the next step."""
        self.queue.remove(request)
        lease.use(request.priority)
        if request.cached_tokens is None:
            request.cached_tokens = lease.committed
            request.count_loaded()
            request.first_scheduled = self.clock()
            self._set_deadline(request, Deadline.RUNNING, self._timeouts.running, self.clock())
        request.transition(Event.ADMITTED, self.clock())
        request.deeper.give_up_prefetch()
        request.lease = lease
        self.running.add(lease.row, request, self.max_length(request), lease.committed)
        self._announce(request, lease)

    def _announce(self, request: Request, lease: Lease) -> None:
        stops = self._vocabulary.eos_tokens if not request.params.ignore_eos else ()
        self.row_starts.append(
            RowStart(
                row=lease.row,
                params=request.params,
                seed=request.seed,
                tokens=request.tokens,
                prompt_length=len(request.prompt),
                stop_tokens=(*stops, *request.params.stop_token_ids),
                max_length=self.max_length(request),
                cached=lease.committed,
                namespace=request.namespace,
                scored_from=request.scored_from,
                pooled_from=request.pooled_from,
                grammar=request.grammar,
                adapter=request.adapter,
            )
        )

    def retract(self, row: int, why: Event) -> None:
        """Return a running request to the queue. Its output is kept and its KV is published, so resuming is cheap
        unless the KV is evicted meanwhile."""
        request = self.running.request(row)
        if why is Event.RETRACTED:
            has_progressed = self.running.length[row] - self.running.prefill_end[row] >= PROGRESS_TOKENS
            request.setbacks = 1 if has_progressed else request.setbacks + 1
        request.transition(why, self.clock())
        self._leave_row(request)
        request.retractions += 1
        self.retraction_count += 1
        self.queue.push(request)

    def end(self, request: Request, finish: Finish) -> None:
        """End a request, queued or running, for any reason. All ends come here."""
        request.transition(finish.event, self.clock())
        if request.lease is not None:
            self._leave_row(request, finish)
        else:
            self.queue.remove(request)
        self.shares.leave(request.client, self.clock())
        request.deeper.give_up_prefetch()
        request.finish = finish
        request.ended = self.clock()
        self.ended.append(request)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request because of a fault in examining it. Raise `error` again if it is a broken invariant."""
        self.end(request, Finish(FinishKind.ERROR, error=fault_of_one(error)))

    def _leave_row(self, request: Request, finish: Finish | None = None) -> None:
        lease = request.lease
        assert lease is not None
        row = lease.row
        tokens = self.running.known_tokens(row)
        self.memory.publish(lease, tokens, request.priority)
        if finish is not None and request.retention is not None:
            request.retained_tokens = self.memory.retain(lease, request.retention, self.clock())
        if finish is not None and finish.is_complete and request.session is not None:
            self.memory.park(lease, request.session, tokens)
        request.tokens = tokens.copy()
        self.running.remove(row)
        lease.release()
        request.lease = None
