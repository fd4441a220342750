"""A scenario: a configuration and what happens when. One seed decides all of it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from freehold.adapter import Adapter
from freehold.config import EVICTION_POLICIES, EngineConfig
from freehold.memory import CacheGroup, PrefetchPolicy, WritePolicy
from freehold.simulation.assembly import SimulatedTiers
from freehold.simulation.groups import GROUPS, sized
from freehold.simulation.mover import Faults

REQUESTS = 32
SESSIONS = 10
TURNS = 24
ROWS = 32
PREFIX_TOKENS = 160
LONGEST = 420  # tokens of prompt and output
VOCAB_SIZE = 1000
EOS_TOKENS = (3, 17, 401)


ADAPTERS = {name: Adapter(name, name, None) for name in ("first", "second")}
CLIENTS = ["greedy"] * 4 + ["modest", "other"]
HINTS = [None, None, None, [0], [50, 0.02], [90, 0.2, 64], [10, 1.0]]  # of retention


@dataclass(frozen=True)
class Cell:
    """One configuration of the matrix."""

    overlap: bool
    page_size: int
    speculation: str
    policy: str
    pool: str
    groups: str = "full"  # of GROUPS

    def __str__(self) -> str:
        schedule = "overlap" if self.overlap else "sync"
        text = f"{schedule}:{self.page_size}:{self.speculation}:{self.policy}:{self.pool}"
        return text if self.groups == "full" else f"{text}:{self.groups}"

    @classmethod
    def parse(cls, text: str) -> Cell:
        """The inverse of str(). Raises ValueError."""
        for cell in matrix():
            if str(cell) == text:
                return cell
        raise ValueError(f"cell: '{text}' is not one of the matrix, such as {next(matrix())}")

    def cache_groups(self, scenario: Scenario) -> tuple[CacheGroup, ...]:
        """Those of the model. In a tight pool there are few bounded pages, too."""
        rows = min(scenario.rows, 2) if self.pool == "tight" else scenario.rows + 1
        return sized(GROUPS[self.groups], self.page_size, scenario.chunk, self.interval(scenario), rows)

    def interval(self, scenario: Scenario) -> int:
        """Tokens between checkpoints: no option in models without states."""
        return scenario.checkpoints * self.page_size if any(group.is_state for group in GROUPS[self.groups]) else 0

    def config(self, scenario: Scenario) -> EngineConfig:
        tokens = scenario.room * LONGEST + 2 * self.page_size if self.pool == "tight" else ROWS * LONGEST
        return EngineConfig(
            page_size=self.page_size,
            num_pages=-(-tokens // self.page_size),
            max_running_requests=scenario.rows,
            max_queued_requests=scenario.queue_limit,
            target_itl_ms=scenario.target_itl_ms,
            audit_interval=scenario.audit_interval,
            disable_radix_cache=not scenario.cached,
            chunked_prefill_size=scenario.chunk,
            schedule_policy=self.policy,
            max_overtaken=scenario.max_overtaken,
            fair_decode_rows=scenario.fair_decode_rows,
            eviction_policy=scenario.eviction,
            cache_tenant_quota=scenario.quota,
            checkpoint_interval=self.interval(scenario),
            cache_retained_share=scenario.retained,
            disable_overlap_schedule=not self.overlap,
            forward_retract_interval=scenario.forward_retract_interval,
            priority_scheduling_preemption_threshold=1 if self.policy == "priority" else None,
            speculative_algorithm=None if self.speculation == "plain" else self.speculation,
            speculative_num_draft_tokens=5,
        )


AXES = (
    (True, False),
    (1, 4, 16, 64, 256),
    ("plain", "ngram", "draft"),
    ("fcfs", "lpm", "priority"),
    ("tight", "ample"),
    tuple(GROUPS),
)


def matrix() -> Iterator[Cell]:
    return (Cell(*values) for values in itertools.product(*AXES))


def diagonal() -> Iterator[Cell]:
    """Every combination of the other axes once, each kind of cache groups equally often."""
    others = itertools.product(*AXES[:-1])
    kinds = [*GROUPS, *reversed(GROUPS)]  # so that no kind always meets the same value of the last axes
    return (Cell(*values, kinds[number % len(kinds)]) for number, values in enumerate(others))


class Verb(StrEnum):
    SUBMIT = "submit"
    ABORT = "abort"  # a request, as soon as it is in a state
    PAUSE = "pause"
    RESUME = "resume"
    HOLD = "hold"  # the engine completes nothing for some iterations
    FAIL = "fail"  # the next step fails
    EXHAUST = "exhaust"  # pages are taken away until `leaving` are free
    RESTORE = "restore"  # and given back
    WEIGHTS = "weights"
    FLUSH = "flush"
    EVICT = "evict"  # pages of prefixes, as if others needed them
    RESTART = "restart"  # the engine's process ends, and another one begins where an operator had brought it
    CURSE = "curse"  # looking a request up fails from now on
    FORK = "fork"  # a session
    REWIND = "rewind"  # a session, to a share of its tokens
    CLOSE = "close"  # a session
    PIN = "pin"  # a prefix, as an operator
    UNPIN = "unpin"
    SAVE = "save"  # a request's tokens, to the deepest tier
    ATTACH = "attach"  # storage, with a policy
    DETACH = "detach"
    CLEAR = "clear"  # storage
    EXPLAIN = "explain"  # pages, and why a request's tokens are not cached
    RECOUNT = "recount"  # all pages, in slices


@dataclass(frozen=True)
class Happening:
    """`verb` with its arguments, at an iteration of the loop."""

    at: int
    verb: Verb
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Scenario:
    cell: Cell
    seed: int
    happenings: list[Happening]
    forward_retract_interval: int = 0
    chunk: int = 64
    eviction: str = "reuse"
    quota: float | None = None
    draft_rate: float = 0.6
    rows: int = ROWS
    max_overtaken: int = 64
    fair_decode_rows: int = 8
    checkpoints: int = 0  # pages between two
    retained: float = 0.5  # share of the pool that hints may retain
    room: int = 1  # sequences of full length that a tight pool holds
    tiers: str | None = None  # a write policy, or no tier below the device
    host_ratio: float = 1.0
    prefetch: str | None = None  # a policy for storage, or no storage
    slow_copies: float = 0.0
    failing_copies: float = 0.0
    lost_copies: float = 0.0
    token_seconds: float = 0.0  # that a prompt token takes; 0 if the engine does not measure its steps
    target_itl_ms: float | None = None
    audit_interval: int = 0
    queue_limit: int = 4096
    cached: bool = True  # whether prefixes are

    @property
    def simulated_tiers(self) -> SimulatedTiers | None:
        if self.tiers is None:
            return None
        faults = Faults(self.seed, self.slow_copies, self.failing_copies, self.lost_copies)
        prefetch = None if self.prefetch is None else PrefetchPolicy(self.prefetch)
        return SimulatedTiers(WritePolicy(self.tiers), self.host_ratio, faults, prefetch)

    @property
    def config(self) -> EngineConfig:
        return self.cell.config(self)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        fields = json.loads(text)
        fields["cell"] = Cell(**fields["cell"])
        fields["happenings"] = [Happening(h["at"], Verb(h["verb"]), h["arguments"]) for h in fields["happenings"]]
        return cls(**fields)

    @classmethod
    def generate(cls, cell: Cell, seed: int) -> Scenario:
        """The scenario of a seed."""
        rng = random.Random(f"{cell} {seed}")
        operator = random.Random(f"operator {cell} {seed}")
        happenings = [*_requests(rng), *_turns(rng), *_troubles(rng), *_orders(operator)]
        happenings.sort(key=lambda happening: happening.at)
        _bind(happenings, random.Random(f"forms {cell} {seed}"))
        _watch(happenings, operator)
        cached = operator.random() > 0.1
        interval = rng.choice([0, 0, 0, 1, 5])
        if interval and cell.page_size > 64:
            interval = 5  # a retraction forgets up to a page: every step, there would hardly be progress
        if interval and cell.pool == "tight" and cell.groups != "full":
            interval = 25  # likewise: if its window or state is evicted meanwhile, it begins anew
        return cls(
            cell=cell,
            seed=seed,
            happenings=happenings,
            forward_retract_interval=interval,
            chunk=rng.choice([7, 64, 256]),
            eviction=rng.choice(EVICTION_POLICIES),
            quota=rng.choice([None, None, 0.2]),
            draft_rate=rng.choice([0.0, 0.3, 0.7, 1.0]),
            rows=rng.choice([2, ROWS, ROWS]),
            max_overtaken=rng.choice([1, 4, 64]),
            fair_decode_rows=rng.choice([1, 2, 8]),
            room=rng.choice([1, 1, 2, 4]),
            checkpoints=rng.choice([0, 0, 1, 3]),
            retained=rng.choice([0.0, 0.5, 1.0]),
            tiers=rng.choice([None, *WritePolicy]) if cached else None,
            host_ratio=rng.choice([0.3, 1.0, 4.0]),
            slow_copies=rng.choice([0.0, 0.3]),
            failing_copies=rng.choice([0.0, 0.0, 0.2]),
            lost_copies=rng.choice([0.0, 0.0, 0.02]),
            prefetch=rng.choice([None, *PrefetchPolicy]),
            token_seconds=operator.choice([0.0, 0.0, 0.00005, 0.002]),
            target_itl_ms=operator.choice([None, 3.0, 20.0]),
            audit_interval=operator.choice([0, 0, 0, 16]),
            queue_limit=operator.choice([4096] * 7 + [3]),
            cached=cached,
        )


def _bind(happenings: list[Happening], rng: random.Random) -> None:
    """Some requests have a grammar; some of those can't be followed to the end."""
    for happening in happenings:
        if happening.verb is Verb.SUBMIT and rng.random() < 0.3:
            fails = [rng.choice([0, 1, 7])] if rng.random() < 0.1 else []
            happening.arguments["form"] = [rng.randrange(1, 1 << 30), rng.choice([1, 6, 25, 1000]), *fails]


def _watch(happenings: list[Happening], rng: random.Random) -> None:
    """Some requests end where an expression matches; of some prompts an embedding is made."""
    for happening in happenings:
        if happening.verb is Verb.SUBMIT:
            draw = rng.random()
            if draw < 0.1:
                happening.arguments["stop_regex"] = [rng.choice(["7[0-4]*>", "(1|2)5><[3-9]", "<.9>"])]
            elif draw < 0.2:
                happening.arguments["pooling"] = rng.choice(["last", "mean"])


def _logprobs(rng: random.Random) -> dict[str, int]:
    """What is asked for of log-probabilities: nothing, the output's, or some of the prompt's as well."""
    return rng.choice([{}, {}, {"logprobs": 0}, {"logprobs": 0, "prompt_logprobs_start": rng.choice([0, 3, 40])}])


def _requests(rng: random.Random) -> Iterator[Happening]:
    """Bursts of requests that share prefixes; some are aborted in a chosen state."""
    families = [[rng.randrange(VOCAB_SIZE) for _ in range(PREFIX_TOKENS)] for _ in range(4)]
    now = 0
    for number in range(REQUESTS):
        now += rng.choice([0, 0, 0, 1, 3, 12])
        prefix = rng.choice(families)[: rng.choice([0, 16, 40, 64, 65, 128, PREFIX_TOKENS])]
        tail = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 5, 17, 60, 180]))]
        name = f"r{number}"
        yield Happening(
            now,
            Verb.SUBMIT,
            {
                "id": name,
                "prompt": prefix + tail,
                "max_tokens": rng.choice([1, 2, 8, 20, 60]),
                "min_tokens": rng.choice([0, 0, 1]),
                "ignore_eos": rng.random() < 0.6,
                "stop": rng.choice([[], [], ["7><"], ["<12", "9>"]]),
                "stop_token_ids": rng.choice([[], [], [5, 55, 555]]),
                "namespace": rng.choice(["", "", "", "tenant"]),
                "adapter": "first" if number % 5 == 4 else "second" if number % 9 == 8 else "",
                "client": rng.choice(CLIENTS),
                "priority": rng.randrange(3),
                "timeout": rng.choice([None] * 8 + [0.05, 1.0]),
                "session": None,
                "retention": rng.choice(HINTS),
                **_logprobs(rng),
            },
        )
        if rng.random() < 0.08:
            name_of_pin, ttl = f"p{rng.randrange(3)}", rng.choice([None, 0.1])
            yield Happening(now + 9, Verb.PIN, {"name": name_of_pin, "tokens": prefix + tail, "ttl": ttl})
            yield Happening(now + rng.choice([10, 60]), Verb.UNPIN, {"name": f"p{rng.randrange(3)}"})
        if rng.random() < 0.25:
            state = rng.choice(["waiting", "prefilling", "running", "retracted", "any"])
            yield Happening(now + rng.choice([0, 1, 4, 15]), Verb.ABORT, {"id": name, "state": state})


def _turns(rng: random.Random) -> Iterator[Happening]:
    """Turns of sessions that together want many times the memory of a tight pool."""
    now = 0
    system = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    # Few: so that forks and retries compute the same tokens, and a tail lies beside what another turn has published.
    asked = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 3, 17, 70)]
    for number in range(TURNS):
        now += rng.choice([0, 0, 2, 9])
        session, name = f"s{rng.randrange(SESSIONS)}", f"t{number}"
        turn = {
            "prompt": rng.choice(asked),
            "first": system,
            "max_tokens": rng.choice([1, 5, 30]),
            "min_tokens": 0,
            "ignore_eos": rng.random() < 0.6,
            "stop": rng.choice([[], [], ["7><"]]),
            "stop_token_ids": [],
            "namespace": "",
            "client": rng.choice(CLIENTS),
            "priority": rng.randrange(3),
            "timeout": rng.choice([None] * 8 + [0.05]),
            "retention": rng.choice(HINTS),
            **_logprobs(rng),
        }
        yield Happening(now, Verb.SUBMIT, {"id": name, "session": session, **turn})
        if rng.random() < 0.25:
            state = rng.choice(["waiting", "prefilling", "running", "any"])
            yield Happening(now + rng.choice([0, 1, 4]), Verb.ABORT, {"id": name, "state": state})
        if rng.random() < 0.1:
            yield Happening(now, Verb.REWIND, {"session": session, "share": rng.random()})
        if rng.random() < 0.1:
            yield Happening(now, Verb.FORK, {"session": session, "to": f"s{rng.randrange(SESSIONS)}"})
        if rng.random() < 0.05:
            yield Happening(now, Verb.CLOSE, {"session": session})
        if rng.random() < 0.15:
            yield from _race(rng, now, name, {**turn, "prompt": rng.choice(asked[1:])})


def _race(rng: random.Random, now: int, name: str, turn: dict[str, Any]) -> Iterator[Happening]:
    """Two sessions compute the same tokens, one ahead of the other: what the first has published, and the host may have
    alone by then, lies beside the tail of the second. Sometimes there is no room to load it."""
    is_short = rng.random() < 0.3
    for number in range(6):
        now += rng.choice([1, 5, 25, 60])
        if number >= 3:
            yield Happening(now, Verb.EVICT, {"pages": rng.choice([1, 4, 1000])})
        if is_short and number == 4:
            yield Happening(now, Verb.EXHAUST, {"leaving": rng.choice([0, 1, 2])})
            yield Happening(now + 30, Verb.RESTORE)
        session = f"{name}-{'first' if number < 3 else 'second'}"
        yield Happening(now, Verb.SUBMIT, {"id": f"{name}.{number}", "session": session, **turn})


def _orders(rng: random.Random) -> Iterator[Happening]:
    """What an operator asks while requests run."""
    for _ in range(rng.choice([0, 2, 4])):
        yield Happening(rng.randrange(5, 200), Verb.EXPLAIN, {"id": f"r{rng.randrange(REQUESTS)}"})
    for _ in range(rng.choice([0, 1, 4])):
        yield Happening(rng.randrange(5, 250), Verb.SAVE, {"id": f"{rng.choice('rt')}{rng.randrange(TURNS)}"})
    for _ in range(rng.choice([0, 0, 1])):
        yield Happening(rng.randrange(5, 200), Verb.RECOUNT)
    for _ in range(rng.choice([0, 0, 1, 2])):
        at, policy = rng.randrange(5, 200), rng.choice([*PrefetchPolicy])
        yield Happening(at, rng.choice([Verb.CLEAR, Verb.DETACH]))
        yield Happening(at + rng.choice([1, 5, 30]), Verb.ATTACH, {"policy": policy})


def _troubles(rng: random.Random) -> Iterator[Happening]:
    for _ in range(rng.choice([0, 1, 3])):
        at = rng.randrange(5, 150)
        yield Happening(at, Verb.HOLD, {"iterations": rng.choice([1, 3, 20])})
    for _ in range(rng.choice([0, 0, 1, 2])):
        at = rng.randrange(5, 150)
        yield Happening(at, Verb.PAUSE, {"mode": rng.choice(["abort", "retract", "retract", "in_place", "in_place"])})
        if rng.random() < 0.5:
            yield Happening(at + 1, Verb.WEIGHTS, {"source": rng.choice("012")})
        yield Happening(at + rng.choice([1, 5, 30]), Verb.RESUME)
    if rng.random() < 0.3:
        yield Happening(rng.randrange(5, 150), Verb.FAIL)
    if rng.random() < 0.4:
        at = rng.randrange(5, 100)
        yield Happening(at, Verb.EXHAUST, {"leaving": rng.choice([0, 1, 3])})
        yield Happening(at + rng.choice([1, 10, 40]), Verb.RESTORE)
    if rng.random() < 0.3:
        yield Happening(rng.randrange(5, 150), Verb.FLUSH)
    if rng.random() < 0.3:
        yield Happening(rng.randrange(5, 150), Verb.WEIGHTS, {"source": rng.choice("012")})
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        yield Happening(rng.randrange(20, 250), Verb.RESTART)
    for _ in range(rng.choice([0, 0, 1])):
        yield Happening(rng.randrange(0, 60), Verb.CURSE, {"id": f"r{rng.randrange(REQUESTS)}"})
