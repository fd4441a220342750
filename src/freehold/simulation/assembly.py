"""The real scheduler and memory around a simulated engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from freehold.config import EngineConfig
from freehold.contract.step import DraftCost, StepTiming
from freehold.contract.vocabulary import Vocabulary
from freehold.memory import CacheGroup, Memory, MemoryShape, PrefetchPolicy, TierPlan, WritePolicy
from freehold.memory.events import EventLog
from freehold.scheduler.scheduler import Scheduler
from freehold.simulation.engine import EngineShape, SimulatedEngine, vocabulary_fields
from freehold.simulation.mover import Faults, SimulatedMover, SimulatedStorage


@dataclass(frozen=True)
class SimulatedModel:
    """The simulated model. `draft_rate` of the drafts are right. Steps are reported to take `token_seconds` for each
    prompt token, and more for rows; if that is 0, they are not measured."""

    vocab_size: int = 1000
    eos_tokens: tuple[int, ...] = ()
    draft_rate: float = 0.6
    groups: Sequence[CacheGroup] = (CacheGroup(),)
    token_seconds: float = 0.0


@dataclass(frozen=True)
class SimulatedTiers:
    """A host tier with `ratio` times the device's pages, and storage behind it. `identity` goes into the keys."""

    write_policy: WritePolicy
    ratio: float
    faults: Faults = Faults()
    prefetch_policy: PrefetchPolicy | None = None
    storage: SimulatedStorage = field(default_factory=SimulatedStorage)
    identity: bytes = b"simulated"


@dataclass(frozen=True)
class SimulatedServer:
    memory: Memory
    engine: SimulatedEngine
    scheduler: Scheduler
    mover: SimulatedMover | None = None


def assemble(
    config: EngineConfig,
    token_limit: int,
    model: SimulatedModel = SimulatedModel(),
    clock: Callable[[], float] = time.monotonic,
    spare_rows: int = 0,
    tiers: SimulatedTiers | None = None,
    events: EventLog | None = None,
) -> SimulatedServer:
    """Build a server around a simulated engine. `spare_rows` are leases beyond those of requests."""
    shape = MemoryShape.of(config, config.num_pages or 256, token_limit, spare_rows, model.groups)
    sizes = EngineShape(
        max(shape.page_counts), shape.page_size, shape.row_count, token_limit, model.vocab_size, shape.groups,
        model.draft_rate, next(iter(model.eos_tokens), -1), model.token_seconds,
    )  # fmt: skip
    engine = SimulatedEngine(sizes)
    plan, mover = None, None
    if tiers is not None:
        counts = tuple(max(int(tiers.ratio * count), 1) for count in shape.page_counts)
        sizes_of_pages = tuple(8 * shape.page_size for _ in counts)
        names = tuple(f"{number} {group.name}".encode() for number, group in enumerate(shape.groups))
        plan = TierPlan(counts, sizes_of_pages, names, tiers.identity, tiers.write_policy, tiers.prefetch_policy)
        mover = SimulatedMover(engine, shape.groups, counts, tiers.faults, tiers.storage)
    memory = Memory(shape, plan, mover, events)
    memory.replace_weights(b"%d" % engine.weights)
    vocabulary = Vocabulary(**vocabulary_fields(model.vocab_size, model.eos_tokens))
    guessed = config.speculative_num_draft_tokens if config.speculative_algorithm else 0
    cost = DraftCost(guessed, forced=config.forced_limit) if guessed or config.forced_limit else None
    timings = [StepTiming(1, 0, 0.004)] if model.token_seconds else []  # a server measures some before it starts
    return SimulatedServer(memory, engine, Scheduler(config, memory, engine, vocabulary, clock, cost, timings), mover)
