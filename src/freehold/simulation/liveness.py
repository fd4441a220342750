"""Oracles of liveness and fairness: overtaking, waiting and deadlines.

They watch requests and their transitions from outside, independent of how the queue is kept. The bounds are those
stated in `docs/memory.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freehold.scheduler.fair_steps import PROMPT_MIN
from freehold.scheduler.request import FinishKind, Request
from freehold.scheduler.scheduler import Scheduler
from freehold.scheduler.states import Event, RequestState

# A request waits while steps in flight still write its tail; with overlap there are at most two.
TAIL_ITERATIONS = 3


class Unfair(AssertionError):
    """A request waits for others longer than allowed."""


class Late(AssertionError):
    """A request outlived its deadline."""


@dataclass
class _Wait:
    """One stay in the queue."""

    entered: int  # iteration
    overtaken: int = 0
    overdue: int = 0  # iterations that admitted another request although this one was due
    behind: int = 0  # iterations in which requests that must yield ran in its place
    allowed: int = 0  # limit of `behind`


class Liveness:
    """Called before and after each iteration of the scheduler. `is_measured`: the engine reports step times."""

    def __init__(self, scheduler: Scheduler, is_measured: bool = False):
        self._scheduler = scheduler
        self._config = scheduler.config
        self._chunk = PROMPT_MIN if is_measured else scheduler.config.chunked_prefill_size  # of a prompt, at least
        self._waits: dict[str, _Wait] = {}
        self._entered = 0
        self._admissions: dict[str, int] = {}
        self._held = 0
        self._counted: _Wait | None = None  # the wait counted as behind in this iteration
        self._submitted = 0  # steps submitted before this iteration

    def before(self, is_held: bool) -> None:
        """Record the waiting requests. While the engine is held, no preemption is possible."""
        self._entered += 1
        self._counted, self._submitted = None, self._scheduler.memory.epochs.submitted
        for request in self._scheduler.requests.values():
            if request.is_queued and request.id not in self._waits:
                self._waits[request.id] = _Wait(self._entered)
            self._admissions[request.id] = _admissions(request)
            self._check_trust(request)
        if not is_held:
            self._check_those_who_give_way()

    def after(self, held: int, ended: list[Request]) -> None:
        """Check an iteration. `held` pages belong to no request that could free them. Raise Unfair or Late."""
        scheduler = self._scheduler
        self._held = held
        # All wait for pages that steps in flight still use, or that are being copied.
        is_waiting = scheduler.memory.epochs.submitted == self._submitted or scheduler.memory.room.is_returning
        if self._counted is not None and is_waiting:
            self._counted.behind -= 1
        live = [*scheduler.requests.values(), *ended]
        admitted = [request for request in live if _admissions(request) > self._admissions.get(request.id, 0)]
        for request in live:
            wait = self._waits.get(request.id)
            if wait is None or request in admitted or request.state is RequestState.ENDED:
                continue
            passed = [other for other in admitted if self._overtakes(other, request, wait)]
            self._count(request, wait, len(passed))
        joined = self._iterations_for([request.lease.row for request in admitted if request.lease is not None])
        for wait in self._waits.values():
            wait.allowed += joined if wait.allowed else 0  # they were admitted while it had to wait for something else
        for request in [*admitted, *ended]:
            self._waits.pop(request.id, None)
        now = scheduler.lifecycle.clock()
        for request in ended:
            self._admissions.pop(request.id, None)
            is_timeout = request.finish is not None and request.finish.kind is FinishKind.TIMEOUT
            if is_timeout and (request.timeout is None or now < request.arrival + request.timeout):
                raise Late(f"{request.id} timed out too early")
        for request in scheduler.requests.values():
            if request.timeout is not None and now >= request.arrival + request.timeout:
                raise Late(f"{request.id} is {request.state} {now - request.arrival - request.timeout:.3f} s too late")

    def _overtakes(self, other: Request, request: Request, wait: _Wait) -> bool:
        """Return whether admitting `other` passed over `request`, which came earlier."""
        entered = self._waits[other.id].entered if other.id in self._waits else self._entered + 1
        is_later = entered > wait.entered and other.order > request.order and other.client == request.client
        return is_later and not (self._config.schedule_policy == "priority" and other.priority > request.priority)

    def _count(self, request: Request, wait: _Wait, passed: int) -> None:
        if passed and wait.overtaken > self._config.max_overtaken + self._before(request, wait):
            wait.overdue += 1
            grace = TAIL_ITERATIONS if request.session is not None else 0
            if wait.overdue > grace:
                raise Unfair(
                    f"{request.id} waits although {wait.overtaken} that came later were admitted, {passed} of them now"
                )
        wait.overtaken += passed

    def _before(self, request: Request, wait: _Wait) -> int:
        """Count requests of its client that entered the line before it and still wait: each delays the moment when it
        is due by one."""
        return sum(
            other.client == request.client and other is not request and self._waits[other.id].entered <= wait.entered
            for other in self._scheduler.requests.values()
            if other.is_queued and other.id in self._waits
        )

    def check_retraction(self, row: int, why: Event) -> None:
        """Check a request about to return to the queue. If memory ran out, it must be the least important one. If it is
        preempted, a waiting request must be more important, or of a less served client. Raise Unfair."""
        scheduler, running = self._scheduler, self._scheduler.running
        request, others = running.request(row), [running.request(one) for one in running.order.tolist()]
        if why is Event.RETRACTED and not self._config.forward_retract_interval:
            least = min(others, key=lambda one: (one.priority, -one.order))
            if request is not least or len(others) == 1:
                raise Unfair(f"{request.id} is sent back, and not {least.id}, the least important of {len(others)}")
        waiting = [one for one in scheduler.requests.values() if one.is_queued]
        if why is Event.PREEMPTED and not any(self._gives_way(request, one) for one in waiting):
            raise Unfair(f"{request.id} is preempted, and no waiting request may take its place")

    def _gives_way(self, request: Request, waiting: Request) -> bool:
        threshold, served = self._config.priority_scheduling_preemption_threshold, self._scheduler.shares.served
        if threshold is not None and request.priority <= waiting.priority - threshold:
            return True
        if self._config.schedule_policy == "priority" and request.priority > waiting.priority:
            return False
        theirs, left = self._holds(request.client), self._holds(waiting.client) + self._needs(waiting)
        stays = theirs - self._weight(request) >= left
        return stays and served(request.client_number) > served(waiting.client_number)

    def _weight(self, request: Request) -> int:
        """Return what a running request holds: a row if none is free, else pages."""
        leases, lease = self._scheduler.memory.leases, request.lease
        assert lease is not None
        return 1 if leases.free_row_count == 0 else lease.allocated // self._scheduler.memory.page_size

    def _holds(self, client: str) -> int:
        running = self._scheduler.running
        requests = [running.request(row) for row in running.order.tolist()]
        return sum(self._weight(request) for request in requests if request.client == client)

    def _needs(self, request: Request) -> int:
        """Return what a waiting request needs at least: a row if none is free, else pages for its tokens and one
        more."""
        memory = self._scheduler.memory
        return 1 if memory.leases.free_row_count == 0 else -(-(len(request.tokens) + 1) // memory.page_size)

    def _check_trust(self, request: Request) -> None:
        """Check that only running out of memory costs trust."""
        squeezed = sum(count for (_, event), count in request.transitions.items() if event is Event.RETRACTED)
        if request.setbacks > squeezed:
            raise Unfair(f"{request.id} is distrusted {request.setbacks} times, memory ran out {squeezed} times")

    # -- requests that must yield ---------------------------------------------------------------------------

    def _check_those_who_give_way(self) -> None:
        """Check that the next request in line gets the place of less important ones, and of clients that hold more than
        its own would. It may wait 2 iterations for each row, plus those that prompts being computed need."""
        scheduler = self._scheduler
        head = scheduler.queue.peek()
        if head is None or scheduler.paused is not None or head.id not in self._waits:
            return
        running = scheduler.running
        rows: list[int] = running.order.tolist()
        going = self._less_important(head, rows) or self._too_much(head, rows)
        if not going or not self._fits_without(head, going) or self._shares_a_prompt(head, rows):
            return
        if scheduler.loading.is_awaited(head) or scheduler.memory.room.is_returning:
            return  # it waits for its prefix, or all wait for pages being copied
        if any(running.request(row).state is RequestState.PREFILLING for row in set(rows) - going):
            return  # the remaining requests have the prompt budget
        wait = self._waits[head.id]
        if wait.allowed == 0:
            wait.allowed = 2 * len(running.requests) + 8 + self._iterations_for(rows)
        wait.behind += 1
        self._counted = wait
        if wait.behind > wait.allowed:
            raise Unfair(f"{head.id} has waited {wait.allowed} iterations for {len(going)} that must yield")

    def _iterations_for(self, rows: list[int]) -> int:
        """Return how many iterations the prompts of running `rows` take. With a retraction at every step, each must
        wait for the steps in flight."""
        todo = int(self._scheduler.running.todo(np.array(rows, np.int64)).clip(0).sum())
        return (2 if self._config.forward_retract_interval else 1) * -(-todo // self._chunk)

    def _less_important(self, head: Request, rows: list[int]) -> set[int]:
        threshold, running = self._config.priority_scheduling_preemption_threshold, self._scheduler.running
        if threshold is None:
            return set()
        return {row for row in rows if running.request(row).priority <= head.priority - threshold}

    def _too_much(self, head: Request, rows: list[int]) -> set[int]:
        """Return rows of other clients beyond what `head` asks for, if its client holds nothing. The unit is rows if
        none is free, else pages."""
        scheduler, running, leases = self._scheduler, self._scheduler.running, self._scheduler.memory.leases
        size, shares = scheduler.memory.page_size, scheduler.shares
        mine = shares.served(head.client_number)
        if any(running.request(row).client == head.client for row in rows):
            return set()
        if self._config.schedule_policy == "priority":
            rows = [row for row in rows if running.request(row).priority <= head.priority]
        needed = 1 if leases.free_row_count == 0 else -(-scheduler.lifecycle.max_length(head) // size) + 1
        going: set[int] = set()
        for client in {running.request(row).client_number for row in rows}:
            if shares.served(client) <= mine:
                continue
            theirs = [row for row in rows if running.request(row).client_number == client]
            weights = {row: self._weight(running.request(row)) for row in theirs}
            left = sum(weights.values())
            for row in sorted(theirs, key=lambda row: (running.request(row).priority, -running.request(row).order)):
                left -= weights[row]
                if left >= needed:
                    going.add(row)
        return going

    def _fits_without(self, head: Request, gone: set[int]) -> bool:
        """Return whether it would fit in the worst case: all that stay use all their output, and nothing is shared."""
        scheduler = self._scheduler
        memory, running = scheduler.memory, scheduler.running
        size = memory.page_size
        stay = sum(-(-int(running.max_length[row]) // size) for row in running.order.tolist() if row not in gone)
        needed = -(-scheduler.lifecycle.max_length(head) // size)
        return needed + stay + self._held + memory.pins.page_count <= memory.shape.page_count

    def _shares_a_prompt(self, head: Request, rows: list[int]) -> bool:
        """Return whether a prompt that begins like its own is being computed: it may wait for that."""
        running, size = self._scheduler.running, self._scheduler.memory.page_size
        first = head.prompt[:size].tolist()
        return any(
            running.request(row).state is RequestState.PREFILLING
            and running.request(row).prompt[:size].tolist() == first
            for row in rows
        )


def _admissions(request: Request) -> int:
    return sum(count for (_, event), count in request.transitions.items() if event is Event.ADMITTED)
