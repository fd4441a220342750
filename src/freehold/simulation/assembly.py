"""The real scheduler and memory around a simulated engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from freehold.config import EngineConfig
from freehold.memory import CacheGroup, Memory, MemoryShape
from freehold.scheduler.scheduler import Scheduler
from freehold.simulation.engine import EngineShape, SimulatedEngine, vocabulary_fields
from freehold.step import DraftCost
from freehold.vocabulary import Vocabulary


@dataclass(frozen=True)
class SimulatedModel:
    """What the engine pretends to be. `draft_rate` of the drafts are right."""

    vocab_size: int = 1000
    eos_tokens: tuple[int, ...] = ()
    draft_rate: float = 0.6
    groups: Sequence[CacheGroup] = (CacheGroup(),)


@dataclass(frozen=True)
class SimulatedServer:
    memory: Memory
    engine: SimulatedEngine
    scheduler: Scheduler


def assemble(
    config: EngineConfig,
    token_limit: int,
    model: SimulatedModel = SimulatedModel(),
    clock: Callable[[], float] = time.monotonic,
    spare_rows: int = 0,
) -> SimulatedServer:
    """`spare_rows` are leases beyond those of requests."""
    shape = MemoryShape.of(config, config.num_pages or 256, token_limit, spare_rows, model.groups)
    memory = Memory(shape)
    sizes = EngineShape(
        max(shape.page_counts), shape.page_size, shape.row_count, token_limit, model.vocab_size, shape.groups,
        model.draft_rate,
    )  # fmt: skip
    engine = SimulatedEngine(sizes)
    vocabulary = Vocabulary(**vocabulary_fields(model.vocab_size, model.eos_tokens))
    cost = DraftCost(config.speculative_num_draft_tokens) if config.speculative_algorithm else None
    return SimulatedServer(memory, engine, Scheduler(config, memory, engine, vocabulary, clock, cost))
