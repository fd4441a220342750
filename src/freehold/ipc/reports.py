"""What the engine's process says of tokens, and when.

Whoever reads a message takes a core from the kernels for a while. So tokens that come within milliseconds of each other
leave together. The first token of a request, and its end, leave at once, with all that was held back before.
"""

from __future__ import annotations

import os

from freehold.config import EngineConfig
from freehold.ipc import protocol as msg
from freehold.scheduler.request import Request
from freehold.scheduler.results import StepOutput

HOLD_S = 0.01  # nobody sees the difference


def hold_seconds(config: EngineConfig) -> float:
    """How many seconds a token may wait for others: none if there is a core that the kernels leave alone."""
    if config.stream_hold_ms is not None:
        return config.stream_hold_ms / 1000
    return HOLD_S if config.num_threads is None or config.num_threads >= len(os.sched_getaffinity(0)) else 0.0


class Reports:
    """Outputs of iterations that have not been sent. `hold`: how many seconds a token may wait for others."""

    def __init__(self, hold: float):
        self._hold = hold
        self._output = StepOutput()
        self._since = 0.0  # when the oldest of its tokens was sampled

    def add(self, output: StepOutput, now: float) -> None:
        held = self._output
        if not held.requests:
            self._since = now
        held.logprobs.update({len(held.tokens) + at: found for at, found in output.logprobs.items()})
        held.requests += output.requests
        held.tokens += output.tokens
        held.ended += output.ended
        held.started += output.started

    def is_due(self, now: float) -> bool:
        held = self._output
        return bool(held.ended or held.started or (held.requests and now >= self._since + self._hold))

    def take(self, stats: msg.Stats | None = None) -> msg.Progress | None:
        """All of it, and `stats`; None if there is nothing to say."""
        output, self._output = self._output, StepOutput()
        if not (output.requests or output.ended or stats):
            return None
        return msg.Progress(
            ids=[request.id for request in output.requests],
            tokens=output.tokens,
            logprobs=output.logprobs,
            ended=[_ended(request) for request in output.ended],
            cached={request.id: request.cached_tokens or 0 for request in output.started},
            prompt_logprobs={one.id: one.prompt_logprobs for one in output.started if one.prompt_logprobs},
            embeddings={one.id: one.embedding.tobytes() for one in output.started if one.embedding is not None},
            stats=stats,
        )


def _ended(request: Request) -> msg.Ended:
    assert request.finish is not None
    error = request.finish.error
    started = request.first_scheduled or request.ended or request.arrival
    return msg.Ended(
        id=request.id,
        kind=request.finish.kind.value,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached_tokens or 0,
        output_tokens=len(request.output),
        retractions=request.retractions,
        queued=started - request.arrival,
        drafted_tokens=request.drafted,
        accepted_tokens=request.accepted,
        retained_tokens=request.retained_tokens,
        cached_by_tier=request.cached_by_tier,
        matched=request.finish.matched,
        failure=None if error is None else msg.Failure.of(error),
    )
