"""Replays a trace on the real scheduler with a simulated engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from freehold.config import EngineConfig
from freehold.contract.errors import InvalidParameter
from freehold.contract.sampling_params import SamplingParams
from freehold.memory import WritePolicy
from freehold.planning.trace import Arrival
from freehold.scheduler.request import Request
from freehold.scheduler.scheduler import Scheduler
from freehold.simulation.assembly import SimulatedTiers, assemble
from freehold.simulation.world import Clock

SAMPLES = 20  # of memory over time
AUDIT_INTERVAL = 256  # steps


@dataclass(frozen=True)
class Speed:
    """Step duration of the simulated engine."""

    step_seconds: float = 0.010
    token_seconds: float = 0.00005


@dataclass
class Replay:
    """The result of a trace. Times are seconds of the simulated clock."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_by_tier: Counter[str] = field(default_factory=Counter[str])  # tokens
    output_tokens: int = 0
    retractions: int = 0
    evicted_pages: int = 0
    steps: int = 0
    duration: float = 0.0
    queued: list[float] = field(default_factory=list[float])
    first_token: list[float] = field(default_factory=list[float])
    memory: list[tuple[float, dict[str, int], int, int]] = field(
        default_factory=list[tuple[float, dict[str, int], int, int]]
    )  # time, pages by owner, running, waiting

    @property
    def cached_tokens(self) -> int:
        return self.cached_by_tier.total()

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)


def replay(
    arrivals: list[Arrival], config: EngineConfig, speed: Speed, on_progress: Callable[[int], None] = lambda ended: None
) -> Replay:
    """Run a trace to its end, checking every read."""
    limit = max(len(arrival.prompt) + arrival.output_length for arrival in arrivals) + 1
    clock = Clock()
    tiers = SimulatedTiers(WritePolicy(config.hicache_write_policy), config.hicache_ratio)
    server = assemble(config, limit, clock=clock, tiers=tiers if config.enable_hierarchical_cache else None)
    memory, engine, scheduler = server.memory, server.engine, server.scheduler
    result, pending, number = Replay(), arrivals[::-1], 0
    sample_every = max(arrivals[-1].at / SAMPLES, 1e-9)
    while pending or scheduler.has_work:
        if not scheduler.has_work:
            clock.now = max(clock.now, pending[-1].at)
        while pending and pending[-1].at <= clock.now:
            arrival, number = pending.pop(), number + 1
            _submit(scheduler, arrival, number, result)
        if server.mover is not None:
            server.mover.advance()
        before = int(memory.leases.committed.sum())
        output = scheduler.step()
        computed = max(int(memory.leases.committed.sum()) - before, len(output.tokens))
        clock.now += speed.step_seconds + speed.token_seconds * computed
        for request in output.ended:
            _count(result, request)
        on_progress(result.requests)
        if clock.now >= sample_every * len(result.memory):
            counts = memory.counts().as_dict()
            result.memory.append((clock.now, counts, len(scheduler.running), len(scheduler.queue)))
        if memory.epochs.submitted % AUDIT_INTERVAL == 0:
            memory.audit()
    memory.audit()
    result.steps, result.duration = engine.steps_run, clock.now
    result.retractions = scheduler.lifecycle.retraction_count
    result.evicted_pages = memory.tree.evictor.evicted_page_count
    return result


def _submit(scheduler: Scheduler, arrival: Arrival, number: int, result: Replay) -> None:
    params = SamplingParams(temperature=0, max_tokens=arrival.output_length, ignore_eos=True)
    try:
        scheduler.add(Request(f"t{number}", arrival.prompt, params))
    except InvalidParameter:
        result.refused += 1


def _count(result: Replay, request: Request) -> None:
    result.requests += 1
    result.prompt_tokens += len(request.prompt)
    result.cached_by_tier.update(request.cached_by_tier)
    result.output_tokens += len(request.output)
    if request.first_scheduled is not None:
        result.queued.append(request.first_scheduled - request.arrival)
    if request.first_token is not None:
        result.first_token.append(request.first_token - request.arrival)


def percentile(values: list[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else 0.0
