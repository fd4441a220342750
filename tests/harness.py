"""A simulated server, ready to be driven step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from freehold.config import EngineConfig
from freehold.contract.adapter import Adapter
from freehold.contract.errors import EngineStuck
from freehold.contract.sampling_params import SamplingParams
from freehold.memory.events import EventLog
from freehold.scheduler.request import Request
from freehold.scheduler.scheduler import StepOutput
from freehold.simulation.assembly import SimulatedModel, SimulatedTiers, assemble
from freehold.simulation.oracle import check_end


@dataclass
class Harness:
    """Audits after every `audit_every` steps; checks every output against a cold run."""

    config: EngineConfig
    token_limit: int = 4096
    model: SimulatedModel = SimulatedModel()
    tiers: SimulatedTiers | None = None
    events: EventLog | None = None
    clock: Callable[[], float] = time.monotonic
    ended: list[Request] = field(default_factory=list[Request])
    audit_every: int = 1
    steps: int = 0

    def __post_init__(self) -> None:
        server = assemble(self.config, self.token_limit, self.model, self.clock, tiers=self.tiers, events=self.events)
        self.memory, self.engine, self.scheduler = server.memory, server.engine, server.scheduler
        self.mover = server.mover
        self._count = 0

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        name: str = "",
        namespace: str = "",
        priority: int = 0,
        client: str = "",
        adapter: Adapter | None = None,
    ) -> Request:
        self._count += 1
        request = Request(
            id=name or f"r{self._count}",
            prompt=np.array(prompt, np.int32),
            params=params,
            namespace=namespace,
            priority=priority,
            client=client,
            adapter=adapter,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> StepOutput:
        output = self.scheduler.step()
        if self.scheduler.stuck is not None:
            raise EngineStuck(self.scheduler.stuck)
        self.steps += 1
        if self.steps % self.audit_every == 0:
            self.memory.audit()
        for request in output.ended:
            # Without max_tokens a request may have what the pool holds, and one token more.
            asked = request.params.max_tokens is not None
            limit = self.token_limit if asked else min(self.token_limit, self.memory.capacity_tokens + 1)
            check_end(request, self.model.vocab_size, self.model.eos_tokens, limit)
        self.ended.extend(output.ended)
        return output

    def run(self) -> list[Request]:
        """Step until all is done -> everything that has ended. Raises EngineStuck if nothing moves."""
        while self.scheduler.has_work:
            self.step()
        counts = self.memory.counts()
        assert counts.lease == counts.pinned == counts.limbo == 0, counts
        return self.ended
