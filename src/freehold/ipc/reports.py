"""When the engine process reports tokens, and what.

Each message takes a core from the kernels while it is read. So tokens sampled within milliseconds of each other are
sent together. A request's first token and its end are sent immediately, with everything held back.
"""

from __future__ import annotations

import os

from freehold.config import EngineConfig
from freehold.ipc import protocol as msg
from freehold.scheduler.request import Request
from freehold.scheduler.results import StepOutput

HOLD_S = 0.01  # imperceptible to users


def hold_seconds(config: EngineConfig) -> float:
    """Return the maximum seconds a token is held: 0 if the kernels leave a core free."""
    if config.stream_hold_ms is not None:
        return config.stream_hold_ms / 1000
    return HOLD_S if config.num_threads is None or config.num_threads >= len(os.sched_getaffinity(0)) else 0.0


class Reports:
    """Unsent outputs of iterations. `hold`: maximum seconds a token is held."""

    def __init__(self, hold: float):
        self._hold = hold
        self._output = StepOutput()
        self._since = 0.0  # when the oldest held token was sampled

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
        """Take all held outputs with `stats`; None if there is nothing to send."""
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
