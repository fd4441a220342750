"""The world of a scenario: the real scheduler and memory, a simulated engine, and a simulated clock."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from freehold.contract.arrays import Int32
from freehold.contract.errors import Unavailable
from freehold.contract.step import Step, TokenLogprobs
from freehold.memory import Hit, Lease, OwnershipError
from freehold.memory.events import EventLog
from freehold.memory.explain import explain
from freehold.scheduler.request import FinishKind, Request
from freehold.scheduler.results import StepOutput
from freehold.scheduler.states import Event, RequestState
from freehold.simulation.asked import request_of
from freehold.simulation.assembly import SimulatedModel, assemble
from freehold.simulation.bounds import check_bounds
from freehold.simulation.compiling import Compiling
from freehold.simulation.convergence import check_content, converge
from freehold.simulation.conversations import Conversations
from freehold.simulation.engine import WrongKV
from freehold.simulation.fair_shares import FairShares
from freehold.simulation.happenings import VOCAB_SIZE, Happening, Verb
from freehold.simulation.liveness import Liveness
from freehold.simulation.mirror import Mirror
from freehold.simulation.model import SimulatedGrammar
from freehold.simulation.operator import Operator
from freehold.simulation.oracle import check_end
from freehold.simulation.scenario import EOS_TOKENS, LONGEST, Scenario
from freehold.simulation.totals import Totals
from freehold.simulation.victims import Victims

AUDIT_INTERVAL = 8  # iterations
CENSUS_INTERVAL = 256
ITERATIONS_MAX = 20_000
RETRACTIONS_MAX = 12  # of one request, where only memory forces them
STEP_SECONDS = 0.004
TOKEN_SECONDS = 0.0001

Cover = Counter[tuple[RequestState, Event]]


class Clock:
    """A clock that advances only when told to."""

    def __init__(self) -> None:
        self.now = 1.0  # not 0, which means that a request has no arrival time yet

    def __call__(self) -> float:
        return self.now


@dataclass
class Summary:
    """The result of a run. `log_hash` covers everything that was planned and everything that ended."""

    steps: int = 0
    sequences: int = 0
    retractions: int = 0
    log_hash: str = ""
    cover: Cover = field(default_factory=Counter[tuple[RequestState, Event]])


class Violation(Exception):
    """An invariant was violated. The message says what, where, and the page's history."""

    def __init__(self, scenario: Scenario, iteration: int, cause: BaseException, history: str):
        self.scenario = scenario
        self.iteration = iteration
        self.cause = cause
        super().__init__(
            f"cell {scenario.cell}, seed {scenario.seed}, iteration {iteration}: "
            f"{type(cause).__name__}: {cause}\n{history}"
        )


class World:
    """Runs one scenario. The engine checks every read, every page is recounted, every output is compared with a cold
    run, and nothing may stall."""

    def __init__(self, scenario: Scenario):
        self.scenario = scenario
        self.config = scenario.config
        self.clock = Clock()
        self.iteration = 0
        self.requests: dict[str, Request] = {}
        self._operator = Operator(scenario.simulated_tiers, self.clock, self.requests)
        self._cursed: set[str] = set()  # requests
        self._gone: set[str] = set()  # requests whose grammar could not be compiled, or whose engine ended
        self._steps_before = 0  # of engines that have ended
        self._start()
        self._pending = sorted(scenario.happenings, key=lambda happening: happening.at)[::-1]
        self._aborts: list[dict[str, Any]] = []
        self._conversations = Conversations(
            forget=lambda name: self.scheduler.forget_session(name), parked=lambda: dict(self.memory.tails).keys()
        )
        self._log = hashlib.blake2b(digest_size=8)
        self._summary = Summary()

    def _start(self) -> None:
        """Start a new engine."""
        scenario, config = self.scenario, self.config
        limit = max(LONGEST, (config.num_pages or 1) * config.page_size)
        model = SimulatedModel(
            VOCAB_SIZE, EOS_TOKENS, scenario.draft_rate, scenario.cell.cache_groups(scenario), scenario.token_seconds
        )
        events = EventLog(config.page_size)
        # The spare row is for the ballast.
        server = assemble(config, limit, model, self.clock, spare_rows=1, tiers=self._operator.tiers, events=events)
        self._mirror = Mirror(events, config.page_size)
        self.memory, self.engine, self.scheduler = server.memory, server.engine, server.scheduler
        self.mover = server.mover
        self._delivered: dict[str, list[int]] = defaultdict(list)
        self._delivered_logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
        self._compiling = Compiling(self.scheduler)
        self._liveness = Liveness(self.scheduler, scenario.token_seconds > 0)
        self._fair_shares = FairShares(self.scheduler, scenario.token_seconds > 0)
        self._totals = Totals(self.scheduler, scenario.cell.speculation == "plain" and not scenario.forced)
        self._ballast: Lease | None = None
        self._release_at: int | None = None
        self._restore_at: int | None = None
        self._first = len(self.requests)  # the number of this engine's first request
        Victims(self.memory)
        self.engine.observe = self._observe
        look_up, retract = self.memory.look_up, self.scheduler.lifecycle.retract

        def retract_checked(row: int, why: Event) -> None:
            self._liveness.check_retraction(row, why)
            retract(row, why)

        def look_up_or_fail(salt: str, tokens: Int32, *rest: Any, **named: Any) -> Hit:
            for name in self._cursed:
                if tokens is self.requests[name].tokens:
                    raise (RuntimeError if self.requests[name].priority else Unavailable)("it was told to fail")
            return look_up(salt, tokens, *rest, **named)

        self.memory.look_up = look_up_or_fail
        self.scheduler.lifecycle.retract = retract_checked
        self._operator.take_over(server)

    def run(self) -> Summary:
        """Run to the end. Raise Violation."""
        try:
            while self._pending or self._compiling or self.scheduler.requests or self.scheduler.has_work:
                self.advance()
                assert self.iteration < self._iterations_max, f"no end: waiting for {self.scheduler.waits_for()}"
            self._check_empty()
        except Exception as error:
            raise Violation(self.scenario, self.iteration, error, self._history(error)) from error
        self._summary.log_hash = self._log.hexdigest()
        return self._summary

    @property
    def _iterations_max(self) -> int:
        """A limit with slack for lost copies: in a small pool everything waits for them until they are late."""
        return ITERATIONS_MAX + (0 if self.mover is None else int(self.mover.lost_s / STEP_SECONDS))

    def advance(self) -> None:
        """Apply what happens now, then run one iteration of the loop."""
        while self._pending and self._pending[-1].at <= self.iteration:
            self._apply(self._pending.pop())
        self._abort_who_is_there()
        if self._release_at is not None and self.iteration >= self._release_at:
            self._release_at, self.engine.hold = None, False
            self.engine.release()
        if self._restore_at is not None and self.iteration >= self._restore_at:
            self._restore_at = None
            self._restore()
        self._compile()
        is_paused, before = self.scheduler.paused is not None, self.engine.steps_run
        self._liveness.before(self.engine.hold)
        if self.mover is not None:
            self.mover.advance()
            assert not self._unsettled or self.scheduler.has_work, "transfers have ended, and would never be settled"
        self._operator.advance()
        output = self.scheduler.step()
        assert not self._unsettled, f"transfers {self._unsettled} have ended, and still hold pages"
        self._mirror.follow()
        self._liveness.after(self._ballast_pages, output.ended)
        self._take(output)
        assert self.scheduler.stuck is None, f"stuck: {self.scheduler.stuck}"
        assert not is_paused or self.engine.steps_run == before, "computed during a pause"
        self.clock.now += STEP_SECONDS + TOKEN_SECONDS * len(self.scheduler.running)
        self.iteration += 1
        if self.iteration % AUDIT_INTERVAL == 0:
            self.memory.audit()
            self._mirror.check(self.memory)
            if self.memory.tiers is not None and self.mover is not None:
                check_content(self.memory.tree, self.memory.tiers, self.mover)
        if self.iteration % CENSUS_INTERVAL == 0:
            check_bounds(self.scheduler, len(self.requests) - self._first)
        self._poison()

    @property
    def _unsettled(self) -> set[int]:
        """Transfers that the mover has ended."""
        if self.memory.tiers is None or self.mover is None:
            return set()
        return {transfer.order.number for transfer in self.memory.tiers.transfers} - self.mover.pending

    # -- what happens -----------------------------------------------------------------------------------

    def _apply(self, happening: Happening) -> None:
        arguments, verb = happening.arguments, happening.verb
        if verb is Verb.SUBMIT:
            self._submit(arguments)
        elif verb is Verb.ABORT:
            self._aborts.append(arguments)
        elif verb is Verb.HOLD:
            self.engine.hold = True
            self._release_at = self.iteration + arguments["iterations"]
        elif verb is Verb.FAIL:
            self.engine.fail_next = RuntimeError("the simulated engine was told to fail")
        elif verb is Verb.EXHAUST:
            self._exhaust(arguments["leaving"])
            self._restore_at = self.iteration + arguments["iterations"]
        elif verb is Verb.EVICT:
            self.memory.tree.evictor.evict(arguments["pages"], "others")
        elif verb is Verb.RESTART:
            self._restart()
        elif verb is Verb.CURSE:
            self._cursed |= {arguments["id"]} & self.requests.keys()
        elif verb in (Verb.FORK, Verb.REWIND, Verb.CLOSE):
            self._conversations.edit(verb, arguments)
        else:
            self._operate(verb, arguments)

    def _operate(self, verb: Verb, arguments: dict[str, Any]) -> None:
        """Give an operator's order. Orders that wait for the steps in flight release them first."""
        if verb in (Verb.PAUSE, Verb.RESUME, Verb.WEIGHTS, Verb.FLUSH):
            self.engine.hold, self._release_at = False, None
            self.engine.release()
        self._operator.ask(verb, arguments)

    def _restart(self) -> None:
        """Replace the engine. Its requests are lost, and so are their turns, including those that ended unreported.
        Sessions go on."""
        self._gone |= {name for name, request in self.requests.items() if request.state is not RequestState.ENDED}
        self._steps_before += self.engine.steps_run
        for session, _ in self._conversations.turns:
            self._conversations.end_turn(session)
        self._start()

    def _submit(self, fields: dict[str, Any]) -> None:
        prompt = fields["prompt"] if fields["session"] is None else self._conversations.begin_turn(fields)
        if prompt is None:
            later = Happening(self.iteration + 3, Verb.SUBMIT, fields)
            self._pending = sorted([*self._pending, later], key=lambda happening: -happening.at)
            return
        request = request_of(fields, prompt)
        self.requests[request.id] = request
        self._compiling.submit(request, self.clock.now)

    def _compile(self) -> None:
        """Pass requests with a compiled grammar to the scheduler. It never sees those whose grammar failed."""
        self._compiling.advance(self.iteration, self.clock.now)
        for request in self._compiling.refused:
            self._gone.add(request.id)
            if request.session is not None:
                self._conversations.end_turn(request.session)
        self._compiling.refused.clear()

    def _abort_who_is_there(self) -> None:
        for order in list(self._aborts):
            request = self.requests.get(order["id"])
            if request is None:
                continue
            if order["state"] in ("any", request.state.value):
                self._compiling.abort(request.id)
                self._compiling.abort(request.id)  # a second abort does nothing
            if request.state is RequestState.ENDED or request.id in self._gone:
                self._aborts.remove(order)

    def _exhaust(self, leaving: int) -> None:
        """Take pages for a lease without a request."""
        if self._ballast is not None or self.memory.leases.free_row_count == 0:
            return
        self._ballast = self.memory.leases.open(self.memory.match("ballast", np.zeros(1, np.int32)))
        take = min(self.memory.free_page_count - leaving, self.memory.shape.token_limit // self.memory.page_size)
        if take > 0:
            self._ballast.extend(take * self.memory.page_size)

    @property
    def _ballast_pages(self) -> int:
        return 0 if self._ballast is None else self._ballast.allocated // self.memory.page_size

    def _restore(self) -> None:
        if self._ballast is not None:
            self._ballast.release()
            self._ballast = None

    # -- what must hold -----------------------------------------------------------------------------------

    def _observe(self, step: Step) -> None:
        """Check each step before it runs."""
        self._fair_shares.check(step)
        committed, size = self.memory.leases.committed[step.rows], self.memory.page_size
        for bounded in self.memory.tree.bounded:
            first = bounded.group.first_column(committed // size * size, size)
            table = self.engine.planned_table(bounded.number)[step.rows]
            named = table[np.arange(table.shape[1]) < first[:, None]]
            assert not named.any(), f"pages of group {bounded.group.name} that no step reads are still named"

    def _take(self, output: StepOutput) -> None:
        assert set(output.logprobs) <= set(range(len(output.tokens))), "log-probabilities of no token"
        for i, (request, token) in enumerate(zip(output.requests, output.tokens, strict=True)):
            self._delivered[request.id].append(token)
            if i in output.logprobs:
                self._delivered_logprobs[request.id].append(output.logprobs[i])
        self._totals.take(output)
        for request in output.ended:
            self._check(request)
        self._log.update(repr((self.iteration, output.tokens, [request.id for request in output.ended])).encode())
        self._summary.steps = self._steps_before + self.engine.steps_run
        self._summary.sequences += len(self.scheduler.running)

    def _check(self, request: Request) -> None:
        assert self._delivered.pop(request.id, []) == request.output.tolist(), f"{request.id}: tokens lost on the way"
        logprobs = self._delivered_logprobs.pop(request.id, [])
        assert logprobs == request.logprobs, f"{request.id}: log-probabilities lost on the way"
        limit = self.memory.shape.token_limit
        check_end(request, VOCAB_SIZE, EOS_TOKENS, limit)
        finish, by_tier = request.finish, request.cached_by_tier
        assert min(by_tier.values()) >= 0, f"{request.id}: cached tokens by tier: {by_tier}"
        drafts = f"{request.id}: {request.accepted} of {request.drafted} drafts were right"
        assert 0 <= request.accepted <= request.drafted, drafts
        if self.scenario.draft_rate in (0.0, 1.0) and request.params.constraint is None:
            assert request.accepted in (0, request.drafted), drafts
        assert finish is not None
        if request.session is not None:
            self._conversations.commit(request.session, request)
        if finish.kind is FinishKind.ERROR:
            verbs = {happening.verb for happening in self.scenario.happenings}
            grammar = request.grammar
            has_failed = isinstance(grammar, SimulatedGrammar) and len(request.output) == grammar.fails
            is_expected = has_failed or verbs & {Verb.FAIL, Verb.EXHAUST} or request.id in self._cursed
            assert is_expected, f"{request.id}: {finish.message}"
        if not self.scenario.forward_retract_interval and not self.config.priority_scheduling_preemption_threshold:
            assert request.retractions <= RETRACTIONS_MAX, f"{request.id}: retracted {request.retractions} times"
        self._summary.retractions += request.retractions
        self._summary.cover.update(request.transitions)

    def _poison(self) -> None:
        """Overwrite free pages, so that reading one is detected."""
        if self.scenario.cell.pool == "ample" and self.iteration % AUDIT_INTERVAL:
            return
        for group, pool in enumerate(self.memory.pools):
            self.engine.poison(pool.free_pages(), group)
        if self.memory.tiers is not None and self.mover is not None:
            for group, pages in enumerate(self.memory.tiers.host.pages):
                self.mover.poison(group, pages.pool.free_pages())

    def _check_empty(self) -> None:
        self._restore()
        self.memory.pins.give_up()
        while self._operator.is_busy or self.scheduler.has_work or (self.mover is not None and self.mover.pending):
            self._rest()
        self.memory.audit()
        self._conversations.check()
        self._operator.check_counts()
        self._totals.check(list(self.requests.values())[self._first :])
        counts = self.memory.counts()
        assert counts.lease == counts.pinned == counts.limbo == counts.transfer == 0, f"leaked: {counts}"
        is_cleared = any(happening.verb is Verb.CLEAR for happening in self.scenario.happenings)
        if self.memory.tiers is not None and self.mover is not None and not is_cleared:  # cleared pages stay away
            converge(self.memory.tree, self.memory.tiers, self.mover, self._rest)
        self.memory.flush()
        self.memory.audit()
        self._mirror.follow()
        check_bounds(self.scheduler, len(self.requests) - self._first)
        deeper = [] if self.memory.tiers is None else [pages.pool for pages in self.memory.tiers.host.pages]
        for pool in [*self.memory.pools, *deeper]:
            assert pool.free_count == pool.capacity, "pages are not back after a flush"
        assert not self.memory.tree.roots, "an empty namespace was kept"
        assert len(self.requests) == sum(h.verb is Verb.SUBMIT for h in self.scenario.happenings)
        ended = (name for name, request in self.requests.items() if request.state is RequestState.ENDED)
        assert self.requests.keys() - self._gone == set(ended)

    def _rest(self, seconds: float = 0.0) -> None:
        """Run an iteration without new requests in which all transfers end."""
        self.clock.now += seconds
        if self.mover is not None:
            self.mover.finish()
        self._operator.advance()
        self.scheduler.step()

    def _history(self, error: Exception) -> str:
        if isinstance(error, WrongKV) and error.page:
            return explain(self.memory, error.page)
        return "" if isinstance(error, OwnershipError) else self.scheduler.waits_for()
