"""A scenario: a configuration and timed events, all decided by one seed."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from freehold.config import EVICTION_POLICIES, EngineConfig
from freehold.contract.adapter import Adapter
from freehold.memory import CacheGroup, PrefetchPolicy, WritePolicy
from freehold.simulation.assembly import SimulatedTiers
from freehold.simulation.groups import GROUPS, sized
from freehold.simulation.happenings import Happening, Verb, bind, orders, requests, troubles, turns, watch
from freehold.simulation.mover import Faults

ROWS = 32
LONGEST = 420  # tokens of prompt and output
EOS_TOKENS = (3, 17, 401)


ADAPTERS = {name: Adapter(name, name, None) for name in ("first", "second")}


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
        """Parse the result of str(). Raise ValueError."""
        for cell in matrix():
            if str(cell) == text:
                return cell
        axes = ":".join("|".join(map(str, axis)) for axis in (("overlap", "sync"), *AXES[1:-1]))
        groups = "|".join(name for name in GROUPS if name != "full")
        raise ValueError(f"cell: '{text}' is not one of the matrix: {axes}, then nothing or :{groups}")

    def cache_groups(self, scenario: Scenario) -> tuple[CacheGroup, ...]:
        """Return the model's cache groups. In a tight pool there are few bounded pages, too."""
        rows = min(scenario.rows, 2) if self.pool == "tight" else scenario.rows + 1
        return sized(GROUPS[self.groups], self.page_size, scenario.chunk, self.interval(scenario), rows)

    def interval(self, scenario: Scenario) -> int:
        """Return tokens between checkpoints: 0 for models without states, which lack the option."""
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
            disable_forced_tokens=not scenario.forced,
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

STRIDE = 557  # between consecutive cells; coprime to their number


def matrix() -> Iterator[Cell]:
    """Return all cells, ordered so that the first few cover every axis."""
    cells = [Cell(*values) for values in itertools.product(*AXES)]
    return (cells[number * STRIDE % len(cells)] for number in range(len(cells)))


def diagonal() -> Iterator[Cell]:
    """Return every combination of the other axes once, each kind of cache groups equally often."""
    others = itertools.product(*AXES[:-1])
    kinds = [*GROUPS, *reversed(GROUPS)]  # so that no kind always meets the same value of the last axes
    return (Cell(*values, kinds[number % len(kinds)]) for number, values in enumerate(others))


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
    checkpoints: int = 0  # pages between checkpoints
    retained: float = 0.5  # share of the pool that hints may retain
    room: int = 1  # sequences of full length that a tight pool holds
    tiers: str | None = None  # a write policy, or no tier below the device
    host_ratio: float = 1.0
    prefetch: str | None = None  # a policy for storage, or no storage
    slow_copies: float = 0.0
    failing_copies: float = 0.0
    lost_copies: float = 0.0
    token_seconds: float = 0.0  # time of a prompt token; 0 if the engine does not measure its steps
    target_itl_ms: float | None = None
    audit_interval: int = 0
    queue_limit: int = 4096
    cached: bool = True  # whether prefixes are cached
    forced: bool = True  # whether tokens forced by a grammar are verified together

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
        """Return the scenario of a seed."""
        rng = random.Random(f"{cell} {seed}")
        operator = random.Random(f"operator {cell} {seed}")
        happenings = [*requests(rng), *turns(rng), *troubles(rng), *orders(operator)]
        happenings.sort(key=lambda happening: happening.at)
        bind(happenings, random.Random(f"forms {cell} {seed}"))
        watch(happenings, operator)
        cached = operator.random() > 0.1
        interval = rng.choice([0, 0, 0, 1, 5])
        if interval and cell.page_size >= 64:
            interval = 5  # a retraction loses up to a page, so one per step would leave hardly any progress
        if interval and cell.pool == "tight" and cell.groups != "full":
            interval = 25  # likewise: it starts over if its window or state is evicted meanwhile
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
            tiers=rng.choice([None, *WritePolicy] if cached else [None] * 4),
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
            forced=operator.random() > 0.1,
        )
