"""A request: what was asked, what has come of it, and where it is in its life."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from freehold.arrays import Int32
from freehold.memory import Lease
from freehold.sampling_params import SamplingParams
from freehold.step import TokenLogprobs


class RequestState(StrEnum):
    WAITING = "waiting"  # in the queue, holds nothing
    PREFILLING = "prefilling"  # has a lease; its known tokens are not all computed
    RUNNING = "running"  # has a lease; decoding
    RETRACTED = "retracted"  # back in the queue with its output so far, holds nothing
    ENDED = "ended"


class FinishKind(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class Finish:
    """Why a request ended. `matched` is the stop token or stop string, if that was the reason."""

    kind: FinishKind
    matched: int | str | None = None
    message: str = ""


@dataclass(eq=False)
class Request:
    """`prompt` int32 [n]. Times are seconds of the scheduler's clock."""

    id: str
    prompt: Int32
    params: SamplingParams
    seed: int = 0
    priority: int = 0
    namespace: str = ""
    arrival: float = 0.0

    order: int = 0  # of arrival; decides among equals
    state: RequestState = RequestState.WAITING
    lease: Lease | None = None
    output: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # kept here while without a row
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    cached_tokens: int | None = None  # prompt tokens not computed, at first scheduling
    retractions: int = 0
    stop_tail: bytes = b""  # the end of the output, in which a stop string may be growing
    finish: Finish | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    ended: float | None = None

    @property
    def tokens(self) -> Int32:
        """Prompt and output so far, of a request without a row."""
        return np.concatenate([self.prompt, self.output])

    @property
    def is_queued(self) -> bool:
        return self.state in (RequestState.WAITING, RequestState.RETRACTED)
