"""A scheduler with a simulated engine, ready to be driven step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from freehold.config import EngineConfig
from freehold.memory import Memory, MemoryShape, cache_groups
from freehold.sampling_params import SamplingParams
from freehold.scheduler.request import FinishKind, Request
from freehold.scheduler.scheduler import Scheduler, StepOutput
from freehold.scheduler.vocabulary import Vocabulary
from freehold.simulation.engine import EngineShape, SimulatedEngine, vocabulary_fields
from freehold.simulation.model import expected_output
from freehold.step import DraftCost

STEPS_WITHOUT_PROGRESS_MAX = 200


class Stuck(AssertionError):
    """Requests wait and nothing changes."""


@dataclass
class Harness:
    """Audits after every step; checks every finished output against a cold run."""

    config: EngineConfig
    token_limit: int = 4096
    vocab_size: int = 1000
    eos_tokens: tuple[int, ...] = ()
    draft_rate: float = 0.6
    ended: list[Request] = field(default_factory=list[Request])

    def __post_init__(self) -> None:
        config = self.config
        shape = MemoryShape(
            page_count=config.num_pages or 256,
            page_size=config.page_size,
            row_count=config.max_running_requests,
            token_limit=self.token_limit,
            eviction_policy=config.eviction_policy,
            prefix_cache=not config.disable_radix_cache,
            groups=cache_groups(config.speculative_algorithm == "draft"),
        )
        self.memory = Memory(shape)
        self.engine = SimulatedEngine(
            EngineShape(
                shape.page_count,
                shape.page_size,
                shape.row_count,
                self.token_limit,
                self.vocab_size,
                len(shape.groups),
                self.draft_rate,
            )
        )
        vocabulary = Vocabulary(**vocabulary_fields(self.vocab_size, self.eos_tokens))
        cost = DraftCost(config.speculative_num_draft_tokens) if config.speculative_algorithm else None
        self.scheduler = Scheduler(config, self.memory, self.engine, vocabulary, draft_cost=cost)
        self._count = 0

    def submit(
        self, prompt: list[int], params: SamplingParams, name: str = "", namespace: str = "", priority: int = 0
    ) -> Request:
        self._count += 1
        request = Request(
            id=name or f"r{self._count}",
            prompt=np.array(prompt, np.int32),
            params=params,
            namespace=namespace,
            priority=priority,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> StepOutput:
        output = self.scheduler.step()
        self.memory.audit()
        for request in output.ended:
            self._check(request)
        self.ended.extend(output.ended)
        return output

    def run(self) -> list[Request]:
        """Step until all is done -> everything that has ended. Raises Stuck if nothing moves."""
        idle, last = 0, -1
        while self.scheduler.has_work:
            self.step()
            progress = self.memory.epochs.submitted + len(self.ended)
            idle = idle + 1 if progress == last else 0
            last = progress
            if idle > STEPS_WITHOUT_PROGRESS_MAX:
                raise Stuck(f"{len(self.scheduler.queue)} requests wait, {len(self.scheduler.running)} run")
        counts = self.memory.counts()
        assert counts.lease == counts.pinned == counts.limbo == 0, counts
        return self.ended

    def _check(self, request: Request) -> None:
        """The output so far is that of a cold run, however the request ended."""
        cold = expected_output(request.prompt, len(request.output), self.vocab_size, request.namespace)
        assert request.output.tolist() == cold, f"{request.id}: wrong output"
        if request.finish and request.finish.kind is FinishKind.LENGTH and request.params.max_tokens:
            limit = min(request.params.max_tokens, self.token_limit - len(request.prompt))
            assert len(request.output) == limit
