"""Simulated grammar compilation: immediate, late, failing, or endless."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

from freehold.contract.constraint import Constraint
from freehold.contract.errors import FreeholdError, InvalidParameter, QueueFull
from freehold.scheduler.parked import Parked
from freehold.scheduler.request import Request
from freehold.scheduler.scheduler import Scheduler
from freehold.simulation.model import SimulatedGrammar

NEVER_ITERATIONS = 60  # the compiler gives up an endless compilation


def constraint_of(form: list[int]) -> Constraint:
    return Constraint(json.dumps(form), "regex")


class SimulatedCompiler:
    """Implements `freehold.scheduler.parked.GrammarCompiler`. The number of a form decides when it compiles."""

    def __init__(self) -> None:
        self._iteration = 0
        self._due: list[tuple[int, Future[Any], list[int]]] = []

    def get(self, constraint: Constraint) -> Future[Any]:
        form, compiled = json.loads(constraint.grammar), Future[Any]()
        late = (form[0] >> 3) % 40
        delay = {0: late, 1: 0, 2: late, 3: NEVER_ITERATIONS}.get(form[0] % 8, 0)
        self._due.append((self._iteration + delay, compiled, form))
        self.advance(self._iteration)
        return compiled

    def settle(self) -> None: ...

    def advance(self, iteration: int) -> None:
        """End the compilations that are due."""
        self._iteration = iteration
        due = [one for one in self._due if one[0] <= iteration]
        self._due = [one for one in self._due if one[0] > iteration]
        for _, compiled, form in due:
            if form[0] % 8 in (1, 2, 3):
                compiled.set_exception(InvalidParameter("regex", "the simulated compiler was told to fail"))
            else:
                compiled.set_result(SimulatedGrammar(*form))


class Compiling:
    """Passes requests to the scheduler once their grammar is compiled, as the engine's loop does."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._compiler = SimulatedCompiler()
        self._parked = Parked(self._compiler, lambda: None, scheduler.config)
        self._waiting: dict[str, Request] = {}
        self.refused: list[Request] = []

    def __bool__(self) -> bool:
        return bool(self._parked)

    def submit(self, request: Request, now: float) -> None:
        """Submit a request. If it is refused, now or later, it is added to `refused`."""
        try:
            if self._parked.park(request, len(self._scheduler.queue), now):
                self._waiting[request.id] = request
                return
        except FreeholdError:
            self.refused.append(request)
            return
        self._add(request)

    def _add(self, request: Request) -> None:
        try:
            self._scheduler.add(request)
        except QueueFull:
            self.refused.append(request)

    def abort(self, name: str) -> None:
        request = self._parked.take(name)
        if request is not None:
            del self._waiting[name]
            self._add(request)
        self._scheduler.abort(name)

    def advance(self, iteration: int, now: float) -> None:
        """Run one turn of the loop."""
        before = self._parked.failure_count
        self._compiler.advance(iteration)
        ready = self._parked.ready(now)
        assert len(ready) == len(self._waiting) - len(self._parked), "a request was lost outside the queue"
        for request, error in ready:
            del self._waiting[request.id]
            if error is None:
                self._add(request)
            else:
                before += 1
                self.refused.append(request)
        assert self._parked.failure_count == before, "grammars that failed are not counted"
        for request in self._waiting.values():
            limit = self._scheduler.config.request_timeout if request.timeout is None else request.timeout
            limits = [one for one in (limit, self._scheduler.config.waiting_timeout) if one is not None]
            assert not limits or now < request.arrival + min(limits), f"{request.id}: it waits for its grammar too long"
