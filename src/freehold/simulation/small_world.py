"""A world small enough to try every order of its events."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from freehold.config import EngineConfig
from freehold.contract.sampling_params import SamplingParams
from freehold.memory import Lease, WritePolicy
from freehold.scheduler.request import Request
from freehold.scheduler.scheduler import PauseMode
from freehold.scheduler.states import Event, RequestState
from freehold.simulation.assembly import SimulatedModel, SimulatedTiers, assemble
from freehold.simulation.liveness import Liveness
from freehold.simulation.oracle import check_end
from freehold.simulation.portrait import Portrait

# The first two begin alike; the third is short. In a scope with a session the second is the turn after the first. With
# a fork it is the fork's turn, and both have ended when exploring begins; the third is the same turn of the session,
# beside a fourth.
PROMPTS = ([1, 2, 3], [1, 2, 4, 5], [6], [6])
MAX_TOKENS = (3, 2, 2, 2)
TURN = [9, 9, 9]  # the new tokens of a session's second turn
ITERATIONS_MAX = 120  # within which all requests must end once nothing else happens
ABORTS_MAX = 1
RETRACTIONS_MAX = 1
PAUSES_MAX = 1
EVICTIONS_MAX = 2
HOST_PAGES = 4


class ActionKind(StrEnum):
    ARRIVE = "arrive"
    ITERATE = "iterate"  # the loop runs once, and no step completes
    RESULT = "result"  # the oldest step completes, and the loop runs once
    FAIL = "fail"  # the oldest step fails, and the loop runs once
    ABORT = "abort"
    RETRACT = "retract"
    PAUSE = "pause"
    CONTINUE = "continue"
    CLOSE = "close"  # the session
    EVICT = "evict"  # a page, for other requests
    TAKE = "take"  # all free pages, until ...
    GIVE = "give"  # ... they are returned
    COPY = "copy"  # the oldest transfer ends
    WEIGHTS = "weights"


@dataclass(frozen=True)
class Action:
    kind: ActionKind
    argument: Any = None

    def __str__(self) -> str:
        return self.kind.value if self.argument is None else f"{self.kind.value} {self.argument}"


@dataclass(frozen=True)
class Scope:
    """A configuration to explore."""

    requests: int
    page_size: int
    pages: int
    overlap: bool
    policy: str = "fcfs"
    session: bool = False
    speculation: str | None = None
    fork: bool = False
    tier: WritePolicy | None = None  # a host of HOST_PAGES

    @property
    def token_limit(self) -> int:
        return 12 if self.fork else 8

    def __str__(self) -> str:
        loop = "overlap" if self.overlap else "sync"
        parts = ("session" if self.session else "", "fork" if self.fork else "", self.speculation, self.tier)
        extra = "".join(f"+{part}" for part in parts if part)
        return f"{self.requests} requests, {self.pages} pages of {self.page_size}, {loop}, {self.policy}{extra}"


def scopes() -> list[Scope]:
    """Return all explored scopes, small ones first."""
    shapes = [(2, 1, 6), (2, 2, 4), (3, 2, 3), (3, 1, 5), (3, 2, 4), (3, 1, 6)]
    plain = [Scope(*shape, overlap) for shape in shapes for overlap in (True, False)]
    with_session = [replace(scope, session=True) for scope in plain if scope.page_size == 2]
    other = [replace(scope, policy=policy) for scope in plain[4:8] for policy in ("lpm", "priority")]
    draft = [replace(scope, speculation="draft") for scope in plain[:4]]
    tiers = [
        Scope(4, 2, pages, overlap, session=True, fork=True, tier=tier)
        for tier in (WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK)
        for pages in (6, 8)
        for overlap in (True, False)
    ]
    return [*plain, *with_session, *other, *draft, *tiers]


class SmallWorld:
    """The real scheduler and memory; the engine completes a step only when told."""

    def __init__(self, scope: Scope):
        self.scope = scope
        config = EngineConfig(
            page_size=scope.page_size,
            num_pages=scope.pages,
            max_running_requests=2,
            chunked_prefill_size=2,
            schedule_policy=scope.policy,
            max_overtaken=1,
            eviction_policy="lru",
            disable_overlap_schedule=not scope.overlap,
            priority_scheduling_preemption_threshold=1 if scope.policy == "priority" else None,
            speculative_algorithm=scope.speculation,
            speculative_num_draft_tokens=2,
        )
        self._clock = 0.0
        tiers = None if scope.tier is None else SimulatedTiers(scope.tier, HOST_PAGES / scope.pages)
        model = SimulatedModel(vocab_size=50, eos_tokens=(7,))
        # One spare row for a request that arrives while a late step holds one, and one for `TAKE`.
        server = assemble(config, scope.token_limit, model, lambda: self._clock, 2, tiers)
        self.memory, self.engine, self.scheduler = server.memory, server.engine, server.scheduler
        self.mover = server.mover
        self.engine.hold = True
        self.memory.tree.history.limit = 0
        growth = self.scheduler.growth
        growth.share, growth.fall = 0.0, 1.0  # a changing share would make every state a new one
        self._requests: list[Request] = []
        self._taken: Lease | None = None
        self._delivered: dict[str, list[int]] = {}
        self._liveness = Liveness(self.scheduler)
        self._left = {
            ActionKind.ABORT: ABORTS_MAX,
            ActionKind.RETRACT: RETRACTIONS_MAX,
            ActionKind.PAUSE: PAUSES_MAX,
            ActionKind.EVICT: EVICTIONS_MAX,
            ActionKind.FAIL: 1,
            ActionKind.WEIGHTS: 1,
            ActionKind.CLOSE: 1,
            ActionKind.TAKE: 0 if scope.tier is None else 1,
        }
        if scope.tier is not None:  # there are enough states without these
            self._left |= dict.fromkeys((ActionKind.RETRACT, ActionKind.PAUSE, ActionKind.FAIL, ActionKind.WEIGHTS), 0)
        for number in range(2 if scope.fork else 0):
            self._arrive(number)
            self._run_on()

    # -- what can happen ------------------------------------------------------------------------------------

    def enabled(self) -> list[Action]:
        """Return what may happen next, without events that obviously change nothing."""
        scheduler, count = self.scheduler, len(self._requests)
        found: list[Action] = []
        if count < self.scope.requests and not self._is_busy(count):
            found.append(Action(ActionKind.ARRIVE, count))
        if scheduler.has_work and scheduler.in_flight_count < (2 if self.scope.overlap else 1):
            found.append(Action(ActionKind.ITERATE))
        if scheduler.in_flight_count:
            found.append(Action(ActionKind.RESULT))
            found += self._limited(Action(ActionKind.FAIL))
        for i, request in enumerate(self._requests):
            if request.state is not RequestState.ENDED:
                found += self._limited(Action(ActionKind.ABORT, i))
            if request.lease is not None and not scheduler.in_flight_count:
                found += self._limited(Action(ActionKind.RETRACT, i))
        if scheduler.paused is None:
            found += [one for mode in PauseMode for one in self._limited(Action(ActionKind.PAUSE, mode.value))]
        else:
            found.append(Action(ActionKind.CONTINUE))
        if self.memory.tree.evictable_page_count:
            found += self._limited(Action(ActionKind.EVICT))
        if count and self.scope.requests == 2:
            found += self._limited(Action(ActionKind.WEIGHTS))
        if self._taken is not None:
            found.append(Action(ActionKind.GIVE))
        elif self.memory.free_page_count and self.memory.leases.free_row_count:
            found += self._limited(Action(ActionKind.TAKE))
        if self.mover is not None and self.mover.pending:
            found.append(Action(ActionKind.COPY))
        is_open = any(request.session == "s" for request in scheduler.requests.values())
        if not is_open and "s" in dict(self.memory.tails):
            found += self._limited(Action(ActionKind.CLOSE))
        return found

    def _limited(self, action: Action) -> list[Action]:
        return [action] if self._left[action.kind] else []

    def _is_busy(self, number: int) -> bool:
        """Return whether request `number` is a turn that must wait for another to end."""
        if self.scope.fork:
            return False
        if not self.scope.session or number > 1:
            return False
        return any(request.session and request.state is not RequestState.ENDED for request in self._requests)

    def apply(self, action: Action) -> None:
        """Apply an event. Raise violations; what an audit would find is left to `check`."""
        kind, argument, scheduler = action.kind, action.argument, self.scheduler
        if kind in self._left:
            self._left[kind] -= 1
        if kind is ActionKind.ARRIVE:
            self._arrive(argument)
        elif kind in (ActionKind.ITERATE, ActionKind.RESULT, ActionKind.FAIL):
            self._turn(kind)
        elif kind is ActionKind.ABORT:
            scheduler.abort(self._requests[argument].id)
        elif kind is ActionKind.RETRACT:
            lease = self._requests[argument].lease
            assert lease is not None
            scheduler.lifecycle.retract(lease.row, Event.RETRACTED)
        elif kind is ActionKind.EVICT:
            self.memory.tree.evictor.evict(3 if self.scope.fork else 1, "others")
        elif kind is ActionKind.TAKE:
            self._taken = self.memory.leases.open(self.memory.match("others", np.zeros(1, np.int32)))
            self._taken.extend(min(self.memory.free_page_count * self.memory.page_size, self.scope.token_limit))
        elif kind is ActionKind.GIVE:
            self._give()
        elif kind is ActionKind.COPY:
            assert self.mover is not None
            self.mover.end_oldest()
        elif kind is ActionKind.CLOSE:
            scheduler.forget_session("s")
            assert "s" not in dict(self.memory.tails), "a closed session left its tail"
        else:
            self._operate(kind, argument)
        for group, pool in enumerate(self.memory.pools):
            self.engine.poison(pool.free_pages(), group)

    def _give(self) -> None:
        if self._taken is not None:
            self._taken.release()
            self._taken = None

    def check(self) -> None:
        """Recount all pages."""
        self.memory.audit()

    def _operate(self, kind: ActionKind, argument: Any) -> None:
        self.engine.release()
        if kind is ActionKind.PAUSE:
            self.scheduler.pause(PauseMode(argument))
        elif kind is ActionKind.CONTINUE:
            self.scheduler.resume()
        else:
            self.scheduler.update_weights("other")

    def _arrive(self, number: int) -> None:
        session = "s" if self.scope.session and number < 2 else None
        if self.scope.fork:
            session = ("s", "fork", "s", None)[number]
        prompt = PROMPTS[number]
        if session and number:
            prompt = [*self._requests[0].tokens.tolist(), *TURN][: self.scope.token_limit - 2]
        most = min(MAX_TOKENS[number], self.memory.capacity_tokens - len(prompt) + 1)
        logprobs = 0 if number == 1 else None
        request = Request(
            id=f"r{number}",
            prompt=np.array(prompt, np.int32),
            params=SamplingParams(temperature=0, max_tokens=most, logprobs=logprobs),
            priority=number,
            session=session,
        )
        self._requests.append(request)
        self.scheduler.add(request)

    def _turn(self, kind: ActionKind) -> None:
        if kind is ActionKind.FAIL:
            self.engine.fail_oldest(RuntimeError("told to fail"))
        elif kind is ActionKind.RESULT:
            self.engine.release(1)
        self._liveness.before(is_held=self.scheduler.in_flight_count > 0)
        output = self.scheduler.step()
        self._liveness.after(0, output.ended)
        for request, token in zip(output.requests, output.tokens, strict=True):
            self._delivered.setdefault(request.id, []).append(token)
        for request in output.ended:
            assert self._delivered.get(request.id, []) == request.output.tolist(), f"{request.id}: tokens lost"
            check_end(request, 50, (7,), self.scope.token_limit)

    def finish(self) -> None:
        """End the world without further events: requests must end as expected, and all pages return."""
        if self.scheduler.paused is not None:
            self.apply(Action(ActionKind.CONTINUE))
        self._give()
        self._run_on()
        failed = [request.id for request in self._requests if request.finish and request.finish.kind == "error"]
        may_fail = not self._left[ActionKind.FAIL] or not self._left[ActionKind.TAKE]
        assert not failed or may_fail, f"{failed} failed, although no step has"
        self.memory.flush()
        self.memory.audit()
        deeper = [] if self.memory.tiers is None else [pages.pool for pages in self.memory.tiers.host.pages]
        assert all(pool.free_count == pool.capacity for pool in [*self.memory.pools, *deeper]), "pages are not back"

    def _run_on(self) -> None:
        """Run until all requests and copies have ended."""
        for _ in range(ITERATIONS_MAX):
            if self.mover is not None:
                self.mover.finish()
            if not self.scheduler.requests and not self.scheduler.has_work:
                break
            self.apply(Action(ActionKind.RESULT if self.scheduler.in_flight_count else ActionKind.ITERATE))
        assert not self.scheduler.requests, f"no end: waiting for {self.scheduler.waits_for()}"

    # -- signature ------------------------------------------------------------------------------------------

    def signature(self) -> bytes:
        """Return a digest, equal for states with the same future. Pages, serials and steps are numbered by order of
        appearance."""
        portrait = Portrait(self.scheduler, self.engine, self.mover, self._requests).everything()
        taken = 0 if self._taken is None else self._taken.allocated
        everything = [portrait, taken, sorted(self._left.items())]
        return hashlib.blake2b(repr(everything).encode(), digest_size=16).digest()
