"""A request: its inputs, its results so far and its state."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from freehold.contract.adapter import Adapter
from freehold.contract.arrays import Float32, Float64, Int32
from freehold.contract.errors import FreeholdError, InvalidParameter
from freehold.contract.prefix_keys import KeyChain
from freehold.contract.sampling_params import SamplingParams
from freehold.contract.step import NOT_SCORED, TokenLogprobs
from freehold.contract.stop_regex import StopRegexes
from freehold.contract.whole import WHOLE_MAX, is_whole
from freehold.memory import Lease, Retention
from freehold.memory.prefix.node import Namespace
from freehold.memory.tiers.storage import Prefetch
from freehold.scheduler.states import Event, RequestState, after

SETBACKS_TRUSTED = 2
PROGRESS_TOKENS = 32  # computed since the last admission, they restore trust


class FinishKind(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


_EVENT_OF = {
    FinishKind.STOP: Event.STOPPED,
    FinishKind.LENGTH: Event.FILLED,
    FinishKind.ABORT: Event.ABORTED,
    FinishKind.TIMEOUT: Event.TIMED_OUT,
    FinishKind.ERROR: Event.FAILED,
}


@dataclass(frozen=True)
class Finish:
    """Why a request ended. `matched` is the stop token or stop string, if one matched; `error` is the failure,
    if there was one."""

    kind: FinishKind
    matched: int | str | None = None
    error: FreeholdError | None = None

    @property
    def message(self) -> str:
        return "" if self.error is None else self.error.message

    @property
    def event(self) -> Event:
        return _EVENT_OF[self.kind]

    @property
    def is_complete(self) -> bool:
        """Whether the output is all that was asked for."""
        return self.kind in (FinishKind.STOP, FinishKind.LENGTH)


@dataclass
class DeeperPrefix:
    """What a request gets from tiers below the device: its `keys`, computed in `namespace`; its `prefetch` from storage
    and the `deadline` for it (seconds of the scheduler's clock; infinite until the request could run without it); the
    number of the `load` it waits for; `load_count` loads that started over; the `known` tokens on the device when the
    newest load began; and the range of tokens loaded, from `begin` to `end`."""

    keys: KeyChain | None = None
    namespace: Namespace | None = None
    prefetch: Prefetch | None = None
    deadline: float = math.inf
    load: int | None = None
    load_count: int = 0
    known: int = 0
    begin: int = 0
    end: int = 0

    def give_up_prefetch(self) -> None:
        """Stop waiting for what is fetched. Idempotent."""
        if self.prefetch is not None:
            self.prefetch.wanted_by -= 1
            self.prefetch = None


@dataclass(eq=False)
class Request:
    """`prompt` int32 [n]. Times are seconds of the scheduler's clock; `timeout` counts from arrival.
    `retention` says how long to keep its KV."""

    id: str
    prompt: Int32
    params: SamplingParams
    seed: int = 0
    priority: int = 0
    namespace: str = ""
    adapter: Adapter | None = None
    client: str = ""  # whose share of the engine it uses
    timeout: float | None = None
    session: str | None = None  # the conversation it continues: resumes from the parked KV, and parks its own
    retention: Retention | None = None
    arrival: float = 0.0

    order: int = 0  # of arrival; breaks ties
    client_number: int = 0  # its account in `Shares`
    state: RequestState = RequestState.WAITING
    state_since: float = 0.0
    transitions: Counter[tuple[RequestState, Event]] = field(default_factory=Counter[tuple[RequestState, Event]])
    seconds_in: dict[RequestState, float] = field(default_factory=dict[RequestState, float])
    lease: Lease | None = None
    tokens: Int32 = field(init=False)  # the prompt, and the output as of when the request last left its row
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    pooled_count: int = 0  # prompt tokens whose hidden states add up to `pooled`
    pooled: Float64 | None = None
    cached_tokens: int | None = None  # prompt tokens not computed, at first scheduling
    loaded_tokens: int = 0  # the part of `cached_tokens` from the host, or through it from storage
    fetched_tokens: int = 0  # the part of `loaded_tokens` from storage
    deeper: DeeperPrefix = field(default_factory=DeeperPrefix)
    miss: str = ""  # why no more was cached
    retractions: int = 0
    setbacks: int = 0  # times in a row that memory ran out before it made progress
    drafted: int = 0  # draft tokens verified for it, of which `accepted` were right
    accepted: int = 0
    retained_tokens: int = 0  # tokens kept because a retention hint asked
    stop_bytes: tuple[bytes, ...] = ()  # the stop strings
    stop_tail: bytes = b""  # the end of the output, which may begin a stop string
    stop_regexes: StopRegexes | None = None
    grammar: object | None = None  # its constraint, compiled by the engine
    finish: Finish | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    ended: float | None = None

    @property
    def is_trusted(self) -> bool:
        """Whether it may be admitted before all its output fits. Only running out of memory costs trust."""
        return self.setbacks < SETBACKS_TRUSTED

    def __post_init__(self) -> None:
        self.tokens = self.prompt

    def check_numbers(self) -> None:
        """Raise InvalidParameter for numbers that don't fit in a row. `params` and `retention` check their own."""
        if not is_whole(self.priority):
            raise InvalidParameter("priority", f"must be between {-WHOLE_MAX} and {WHOLE_MAX}, got {self.priority}")
        if not is_whole(self.seed, -(2**63), 2**64 - 1):
            raise InvalidParameter("seed", f"must be a 64-bit integer, got {self.seed}")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise InvalidParameter("timeout", f"must be a positive number of seconds, not {self.timeout:g}")

    @property
    def output(self) -> Int32:
        """The output as of when the request last left its row, int32 [n] (a view)."""
        return self.tokens[len(self.prompt) :]

    @property
    def scored_from(self) -> int:
        """The first position whose requested log-probabilities are still missing."""
        start = self.params.prompt_logprobs_start
        if start is None or start + len(self.prompt_logprobs) >= len(self.prompt) - 1:
            return NOT_SCORED
        return start + len(self.prompt_logprobs)

    @property
    def pooled_from(self) -> int:
        """The first position whose hidden state the embedding still lacks."""
        if self.params.pooling is None or self.pooled_count == self._pooled_whole:
            return NOT_SCORED
        return len(self.prompt) - self._pooled_whole + self.pooled_count

    @property
    def _pooled_whole(self) -> int:
        return 1 if self.params.pooling == "last" else len(self.prompt)

    @property
    def computed_from(self) -> int:
        """The first position that must be computed, not taken from the cache."""
        return min(self.scored_from, self.pooled_from)

    def pool(self, count: int, total: Float64) -> None:
        """Add `total` [hidden_size], the sum of the hidden states of `count` more prompt tokens."""
        self.pooled_count += count
        self.pooled = total if self.pooled is None else self.pooled + total

    @property
    def embedding(self) -> Float32 | None:
        """The prompt's embedding [hidden_size], if requested and complete."""
        is_complete = self.pooled is not None and self.pooled_count == self._pooled_whole
        return (self.pooled / self.pooled_count).astype(np.float32) if is_complete and self.pooled is not None else None

    def watch_for_stops(self) -> None:
        """Prepare to match the request's own stops in its output."""
        self.stop_bytes = tuple(stop.encode() for stop in self.params.stop)
        self.stop_regexes = StopRegexes(self.params.stop_regex) if self.params.stop_regex else None

    def count_loaded(self) -> None:
        """Record, at first scheduling, which cached tokens came from deeper tiers."""
        deeper, cached = self.deeper, self.cached_tokens or 0
        end = min(cached, deeper.end)
        self.loaded_tokens = max(end - deeper.begin, 0)
        if deeper.prefetch is not None:
            self.fetched_tokens = max(
                min(end, deeper.prefetch.boundary) - max(deeper.begin, deeper.prefetch.was_there), 0
            )

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """Cached prompt tokens by the tier that had them. Deeper tiers are left out if they had none."""
        cached, loaded, fetched = self.cached_tokens or 0, self.loaded_tokens, self.fetched_tokens
        deeper = {"host": loaded - fetched, "storage": fetched}
        return {"device": cached - loaded, **{tier: count for tier, count in deeper.items() if count}}

    @property
    def is_queued(self) -> bool:
        return self.state in (RequestState.WAITING, RequestState.RETRACTED)

    def transition(self, event: Event, now: float) -> None:
        """Move to the next state; nothing else may. Raise ImpossibleEvent."""
        following = after(self.state, event)
        self.transitions[self.state, event] += 1
        self.seconds_in[self.state] = self.seconds_in.get(self.state, 0.0) + now - self.state_since
        self.state, self.state_since = following, now


def check_token_ids(tokens: Sequence[int], vocab_size: int) -> Int32:
    """Return the ids as int32 [n]. Raise InvalidParameter for ids outside the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidParameter("prompt", f"token id {token} is outside the vocabulary of {vocab_size}")
    return np.array(tokens, np.int32)


def make_requests(
    request_id: str, prompt: Int32, params: SamplingParams, adapter: Adapter | None = None
) -> list[Request]:
    """Return `n` requests for one prompt. They share its pages as any equal prompts do. With a seed, sample i uses
    seed + i."""
    seed = secrets.randbits(63) if params.seed is None else params.seed
    single = replace(params, n=1) if params.n > 1 else params
    return [
        Request(
            id=request_id if params.n == 1 else f"{request_id}-{i}",
            prompt=prompt,
            params=single,
            seed=seed + i,
            adapter=adapter,
        )
        for i in range(params.n)
    ]
