"""Every call of what scheduler and memory rely on fails once: the n-th call, for all n, of a life that has everything.

What a callee reports ends one request, or the command that asked for it, and no other request notices: all other
outputs are those of the run without a fault, and all pages come back. What breaks in the middle of a move is raised
through all that lies above, which ends the engine.
"""

import sys
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.contract.constraint import Constraint
from freehold.contract.errors import EngineStuck, FreeholdError, InvalidParameter, QueueFull, Unavailable
from freehold.contract.orders import Kind
from freehold.contract.sampling_params import SamplingParams
from freehold.contract.slices import finished
from freehold.memory import LeaseError, OwnershipError, PinRefused, PrefetchPolicy, Retention, WritePolicy
from freehold.memory.audit import recounting
from freehold.memory.events import EventLog
from freehold.memory.lease import Lease
from freehold.memory.lease_table import LeaseTable
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.ledger.errors import OutOfPages
from freehold.memory.ledger.pool import PagePool
from freehold.memory.prefix.hints import Hints
from freehold.memory.prefix.holds import Holds
from freehold.memory.tails import TailTable
from freehold.memory.tiers.host import HostPages
from freehold.scheduler.parked import Parked
from freehold.scheduler.request import Request
from freehold.scheduler.scheduler import PauseMode
from freehold.simulation.assembly import SimulatedModel, SimulatedTiers
from freehold.simulation.bounds import check_bounds
from freehold.simulation.engine import SimulatedEngine
from freehold.simulation.groups import GROUPS, sized
from freehold.simulation.model import SimulatedGrammar
from freehold.simulation.mover import NEVER, SimulatedMover
from harness import Harness

PAGE, CHUNK, EOS = 4, 16, 3
STEP_S = 0.05
SYSTEM = list(range(20, 44))


class Grammars:
    """Compiles what is asked for in the next iteration."""

    def __init__(self) -> None:
        self._asked: list[tuple[Constraint, Future[Any]]] = []

    def get(self, constraint: Constraint) -> Future[Any]:
        self._asked.append((constraint, Future()))
        return self._asked[-1][1]

    def settle(self) -> None:
        for constraint, future in self._asked:
            self.compile(constraint, future)
        self._asked.clear()

    def compile(self, constraint: Constraint, future: Future[Any]) -> None:
        future.set_result(SimulatedGrammar(7, 5))


class Life:
    """A scheduler's life: turns, forks, pins, hints, loads, fetches, grammars, weights, pauses, too little memory."""

    def __init__(self, policy: WritePolicy):
        self.now = 1.0
        groups = sized(GROUPS["full+window5"], PAGE, CHUNK, 0, 5)
        config = EngineConfig(
            page_size=PAGE, num_pages=28, max_running_requests=4, chunked_prefill_size=CHUNK, watchdog_timeout=20
        )
        tiers = SimulatedTiers(policy, 3.0, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE)
        model = SimulatedModel(eos_tokens=(EOS,), groups=groups)
        self.h = Harness(config, 200, model, tiers, EventLog(PAGE), lambda: self.now, audit_every=10)
        self.scheduler, self.memory, self.mover, self.tiers = (
            self.h.scheduler, self.h.memory, self.h.mover, self.h.memory.tiers
        )  # fmt: skip
        self.grammars = Grammars()
        self.parked = Parked(self.grammars, lambda: None, config)
        self.histories: dict[str, list[int]] = {}
        self.refused: dict[str, FreeholdError] = {}  # requests and commands
        self.lost: set[str] = set()  # requests that were in a step which failed

    # -- what happens ---------------------------------------------------------------------------------

    def command(self, name: str, call: Callable[[], Any]) -> Any:
        """As the engine's loop carries one out: errors that the caller hears of."""
        try:
            return call()
        except FreeholdError as error:
            self.refused[name] = error

    def ask(self, name: str, prompt: list[int], tokens: int = 6, session: str | None = None, **fields: Any) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, constraint=fields.pop("constraint", None)
        )
        whole = np.array([*self.histories.get(session or "", []), *prompt], np.int32)
        request = Request(name, whole, params, session=session, **fields)
        try:
            if not self.parked.park(request, len(self.scheduler.queue), self.now):
                self.scheduler.add(request)
        except FreeholdError as error:
            self.refused[name] = error

    def admit(self, request: Request, error: FreeholdError | None) -> None:
        """Its grammar is ready, or never will be."""
        try:
            if error is not None:
                raise error
            self.scheduler.add(request)
        except FreeholdError as refusal:
            self.refused[request.id] = refusal

    def turn(self) -> None:
        """One of the engine's loop."""
        self.mover.advance()
        for request, error in self.parked.ready(self.now):
            self.admit(request, error)
        for request in self.h.step().ended:
            if request.finish.is_complete and request.session is not None:
                self.histories[request.session] = request.tokens.tolist()
        self.memory.events.take()
        self.now += STEP_S

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def quiet(self) -> None:
        """Until all requests have ended."""
        for _ in range(2000):
            if not (self.scheduler.requests or self.parked):
                break
            self.turn()
        assert not self.scheduler.requests, self.scheduler.waits_for()
        self.turns(5)

    def run(self) -> None:
        self.begin()
        self.come_back()
        self.operate()
        self.end()

    def begin(self) -> None:
        self.ask("first", SYSTEM + [1] * 9, 7, "s", retention=Retention(80, 1.0))
        self.ask("same", SYSTEM + [1] * 9, 3, "t", client="other")
        self.turns(2)
        self.ask("bound", [5] * 9, 9, constraint=Constraint("[7]", "regex"))
        self.ask("gone", [6] * 30, 30)
        self.turns(3)
        self.scheduler.abort("gone")
        self.quiet()
        try:
            assert self.memory.pin("p", "", np.array(SYSTEM, np.int32), self.now + 2) is not None
        except PinRefused as error:
            self.refused["pin"] = InvalidParameter("id", str(error))

    def come_back(self) -> None:
        """What was evicted is loaded, and what the host has lost is fetched."""
        self.histories["fork"] = list(self.histories.get("s", []))
        self.ask("turn", [2] * 3, 5, "s")
        self.quiet()
        self.memory.tree.evictor.evict(64, "others")
        self.turns(6)
        self.ask("loaded", [3] * 6, 5, "s")
        self.ask("beside", SYSTEM + [1] * 9 + [4], 5)
        self.quiet()
        self.memory.pins.unpin("p")
        self.memory.flush()
        finished(self.memory.flushing())
        self.ask("fetched", [8] * 2, 5, "fork")
        self.quiet()

    def operate(self) -> None:
        """Orders of an operator, while requests run that together want more pages than there are."""
        for number in range(4):
            self.ask(f"big{number}", [50 + number] * 20, 24, client=f"c{number % 2}", session=f"b{number}")
        self.turns(6)
        tokens = np.array(self.histories.get("s", [1]), np.int32)
        saved = finished(self.tiers.saving(self.memory.tree.namespace(""), tokens).looking())
        assert saved.tokens >= 0
        self.command("pause", lambda: self.scheduler.pause(PauseMode.RETRACT))
        self.turns(2)
        self.scheduler.resume()
        self.turns(4)
        self.command("weights", lambda: self.scheduler.update_weights("1"))
        self.quiet()
        self.ask("after", [2] * 3, 5, "s")
        self.quiet()
        self.scheduler.forget_session("t")

    def end(self) -> None:
        """Nothing is left of it."""
        self.memory.pins.give_up()
        self.turn()
        while self.mover.pending or self.scheduler.has_work:
            self.mover.finish()
            self.turn()
        assert not self.tiers.storage._underway, "a prefetch goes on for ever"
        check_bounds(self.scheduler, 8)
        counts = self.memory.counts()
        assert counts.lease == counts.pinned == counts.limbo == counts.transfer == 0, counts
        self.memory.flush()
        self.memory.audit()
        for pool in [*self.memory.pools, *(pages.pool for pages in self.tiers.host.pages)]:
            assert pool.free_count == pool.capacity, "pages are not back after a flush"

    @property
    def outcomes(self) -> dict[str, tuple[Any, ...]]:
        ended = {one.id: (one.finish.kind.value, tuple(one.output.tolist())) for one in self.h.ended}
        return {**ended, **dict.fromkeys(self.refused, ("refused",))}


# -- faults -------------------------------------------------------------------------------------------


class Told(Exception):
    """A call was told to fail."""


@dataclass
class Nth:
    """Wraps a function: `instead(original, *arguments)` is called in place of the n-th call. With a `period` also in
    place of each one so many calls later: for faults that no other request notices, so that fewer lives have all."""

    number: int
    period: int = 1 << 40
    calls: int = 0
    has_struck: bool = False

    def wrap(self, owner: Any, name: str, instead: Callable[..., Any], patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if (self.calls - 1) % self.period != self.number - 1:
                return original(*arguments, **named)
            self.has_struck = True
            return instead(original, *arguments, **named)

        patch.setattr(owner, name, call)


def raising(error: Exception) -> Callable[..., Any]:
    def instead(original: Any, *arguments: Any, **named: Any) -> Any:
        raise error

    return instead


def failing(error: Exception) -> Callable[..., Any]:
    """A future that ends with the error."""

    def instead(original: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(error)
        return future

    return instead


POLICIES = [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK]
ALONE = {policy: Life(policy) for policy in POLICIES}


@pytest.fixture(scope="module", autouse=True)
def _lives_without_a_fault():
    for life in ALONE.values():
        if not life.h.ended:
            life.run()
        assert not life.refused
        assert life.scheduler.lifecycle.retraction_count
        assert all(life.mover.moved[kind] for kind in (Kind.BACKUP, Kind.LOAD, Kind.STORE, Kind.PROBE))
    assert ALONE[WritePolicy.WRITE_THROUGH].mover.moved[Kind.FETCH]


def suffered(life: Life, policy: WritePolicy) -> set[str]:
    """Requests that did not end as without a fault."""
    alone, now = ALONE[policy].outcomes, life.outcomes
    return {name for name in alone.keys() | now.keys() if alone.get(name) != now.get(name)}


def each_call(
    policy: WritePolicy,
    install: Callable[[Life, Nth, pytest.MonkeyPatch], None],
    check: Callable[[Life], None],
    period: int = 1 << 40,
) -> int:
    """A life for each call, or for as many as the period has -> how many there were."""
    for number in range(1, min(period, 1000) + 1):
        life, nth = Life(policy), Nth(number, period)
        with pytest.MonkeyPatch.context() as patch:
            install(life, nth, patch)
            life.run()
        if not nth.has_struck:
            return number - 1  # there are no more calls
        check(life)
    return number


def end_of_order(kind: Kind, how: str) -> Callable[[Life, Nth, pytest.MonkeyPatch], None]:
    """An order that moves nothing, or all but its last page, or that nobody hears of for a hundred iterations."""

    def install(life: Life, nth: Nth, patch: pytest.MonkeyPatch) -> None:
        mover = life.mover

        def instead(begin: Any, order: Any, report: Any) -> None:
            def fail(outcome: Any) -> None:
                whole = [part & (np.arange(len(part)) + 1 < len(part)) & (how != "nothing") for part in outcome.whole]
                if order.kind in (Kind.LOAD, Kind.BACKUP, Kind.FETCH):
                    targets = order.device if order.kind is Kind.LOAD else order.host
                    for group, (pages, part) in enumerate(zip(targets, whole, strict=True)):
                        mover._slots(order.kind is Kind.LOAD, group)[pages[~part]] = 0
                report(replace(outcome, whole=whole, error="told to fail"))

            begin(order, report if how == "never" else fail)
            if how == "never":
                mover._pending[-1].due = NEVER

        others, of_kind = mover.begin, SimpleNamespace(begin=mover.begin)
        nth.wrap(of_kind, "begin", instead, patch)
        patch.setattr(
            mover, "begin", lambda order, report: (of_kind.begin if order.kind is kind else others)(order, report)
        )

    return install


@pytest.mark.sampled(15)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["nothing", "all but one", "never"])
@pytest.mark.parametrize("kind", Kind)
def test_every_order_ends_badly_once(kind, how, policy):
    def check(life: Life) -> None:
        assert not suffered(life, policy)

    # Pages of an order that never ends are lost: of many such loads there are not enough left for one request.
    lives = each_call(policy, end_of_order(kind, how), check, 9 if how == "never" else 3)
    assert lives or (kind is Kind.FETCH and policy is WritePolicy.WRITE_BACK)


def test_every_step_fails_once():
    policy = POLICIES[0]

    def install(life: Life, nth: Nth, patch: pytest.MonkeyPatch) -> None:
        def instead(execute: Any, step: Any) -> Any:
            life.lost |= {life.scheduler.running.request(int(row)).id for row in step.rows}
            life.h.engine.fail_next = Told("told to fail")
            return execute(step)

        nth.wrap(life.h.engine, "execute", instead, patch)

    def check(life: Life) -> None:
        lost = {name for name in suffered(life, policy) if life.outcomes[name][0] == "error"}
        assert lost <= life.lost

    assert each_call(policy, install, check, 11) == 11


def test_every_lookup_in_storage_fails_once():
    policy = POLICIES[0]

    def install(life: Life, nth: Nth, patch: pytest.MonkeyPatch) -> None:
        nth.wrap(life.tiers.storage, "looking_up", raising(Told("told to fail")), patch)

    def check(life: Life) -> None:
        # The turns of a session go on from other histories if one of them failed.
        assert len({name for name in suffered(life, policy) if life.outcomes[name][0] == "error"}) == 1

    assert each_call(policy, install, check) >= 10


COMMANDS = {  # callee, what it does instead, and the request or command that hears of it
    "weights are not there": (lambda life: life.h.engine, "load_weights", failing(OSError("told to fail")), "weights"),
    "weights never come": (lambda life: life.h.engine, "load_weights", failing(TimeoutError()), "weights"),
    "a pin is refused": (lambda life: life.memory.pins, "pin", raising(PinRefused("told to fail")), "pin"),
    "too many hang": (lambda life: life.grammars, "get", raising(Unavailable("told to fail")), "bound"),
    "a bad grammar": (lambda life: life.grammars, "get", failing(InvalidParameter("regex", "told to")), "bound"),
    "a late bad grammar": (
        lambda life: life.grammars, "compile",
        lambda original, constraint, future: future.set_exception(InvalidParameter("regex", "told to")), "bound",
    ),
    "a pause is not possible": (lambda life: life.scheduler, "drain", raising(EngineStuck("told to")), None),
    "full": (lambda life: life.scheduler.lifecycle, "accept", raising(QueueFull("told to fail")), None),
}  # fmt: skip


@pytest.mark.parametrize("what", COMMANDS)
def test_who_asked_hears_of_it_and_nobody_else(what):
    of, name, instead, who = COMMANDS[what]
    policy = POLICIES[0]

    def install(life: Life, nth: Nth, patch: pytest.MonkeyPatch) -> None:
        nth.wrap(of(life), name, instead, patch)

    def check(life: Life) -> None:
        assert len(life.refused) == 1
        if who is not None:
            assert set(life.refused) == {who}
        # The turns of a session go on from other histories if one of them was refused.
        assert what == "full" or suffered(life, policy) <= set(life.refused) | {who}

    assert each_call(policy, install, check) >= 1


BROKEN = [
    (PagePool, "allocate", OutOfPages), (PagePool, "move", OwnershipError), (PagePool, "free", OwnershipError),
    (TailTable, "take", LeaseError), (Holds, "pin", LeaseError), (Lease, "adopt", LeaseError),
    (Lease, "release", LeaseError), (LeaseTable, "open", LeaseError), (HostPages, "hold", KeyError),
    (Hints, "retain", LeaseError), (HostPages, "drop", LeaseError), (Epochs, "complete", ValueError),
    (SimulatedMover, "begin", RuntimeError), (SimulatedEngine, "execute", RuntimeError),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name", "error"), BROKEN)
def test_what_breaks_in_a_move_ends_the_engine(owner, name, error):
    """From each place that it is called from."""
    ways: set[tuple[str, ...]] = set()
    while True:
        before = len(ways)
        original = getattr(owner, name)

        def call(*arguments: Any, original: Any = original, **named: Any) -> Any:
            frame, way = sys._getframe(1), []
            while frame is not None and frame.f_code.co_name != "run":
                way.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                frame = frame.f_back
            if tuple(way[:4]) not in ways:
                ways.add(tuple(way[:4]))
                raise error("told to fail")
            return original(*arguments, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, call)
            life = Life(POLICIES[0])
            try:
                life.run()
            except error:
                continue
        assert len(ways) == before, f"swallowed: {ways}"
        break
    assert ways


@pytest.mark.parametrize("of", [
    lambda life: life.memory.flushing(), lambda life: life.memory.auditing(), lambda life: recounting(life.memory),
    lambda life: life.tiers.saving(life.memory.tree.namespace(""), np.array(life.histories["s"], np.int32)).looking(),
])  # fmt: skip
def test_work_in_slices_may_be_left_in_the_middle(of):
    count = 1
    while True:
        life = Life(POLICIES[0])
        life.begin()
        work, is_over = of(life), False
        for _ in range(count):
            is_over = next(work, None) is None and work.gi_frame is None
        work.close()
        life.memory.audit()
        life.come_back()
        life.operate()
        life.end()
        assert not suffered(life, POLICIES[0])
        if is_over:
            break
        count += 2
