"""Shared by all generating routes: jobs, and outputs gathered, streamed and counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from freehold.contract.arrays import Int32
from freehold.contract.errors import Aborted, BadRequest, InvalidParameter
from freehold.contract.sampling_params import SamplingParams
from freehold.contract.step import TokenLogprobs
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Ended, Options
from freehold.ipc.streams import Delta
from freehold.server.access.clients import Client
from freehold.server.answers.reading import OutputReader
from freehold.server.operator.metrics import Metrics
from freehold.server.sessions.table import Turn
from freehold.text.answers.answer import Answer
from freehold.text.answers.parser import ExpectedAnswer


@dataclass
class Output:
    """One output, as received so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    cached_tokens: int = 0
    ended: Ended | None = None
    answer: Answer = field(default_factory=Answer)
    reasoning_tokens: int = 0
    embedding: bytes = b""

    @property
    def end(self) -> Ended:
        assert self.ended is not None
        return self.ended

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.cached_tokens = delta.cached_tokens
        self.answer.add(delta.events)
        self.reasoning_tokens = delta.reasoning_tokens
        self.embedding = delta.embedding or self.embedding
        self.ended = delta.ended or self.ended


@dataclass(frozen=True)
class Job:
    """A validated request of any route, ready to run. `id` is the response's."""

    id: str
    prompts: list[Int32]
    params: SamplingParams
    options: Options
    prompt_field: str  # the body's name for the prompt
    client: Client
    skip_special_tokens: bool = True
    turn: Turn | None = None  # of a session
    expected: ExpectedAnswer | None = None  # how to read it; None if all of it is content

    @property
    def marks(self) -> Mapping[int, str]:
        """Texts that replace marker tokens."""
        return {} if self.expected is None else self.expected.marks


class Generator:
    """Runs jobs of at most `output_limit` outputs each, and records latency metrics."""

    def __init__(self, engine: AsyncEngine, metrics: Metrics, output_limit: int):
        self._engine = engine
        self._metrics = metrics
        self._output_limit = output_limit
        self._owners: dict[str, str] = {}  # of running jobs, by id

    async def deltas(self, job: Job) -> AsyncGenerator[Delta]:
        """Yield the job's deltas. Raises the error of a failed output, unless it was aborted."""
        self.check_outputs(len(job.prompts), job.params.n, job.prompt_field)
        self._check_biases(job)
        arrival = time.monotonic()
        last: dict[int, float] = {}
        if job.turn is not None:
            job.turn.request_id = job.id
        options = job.options.of(job.client.share)
        stream = self._engine.stream(job.prompts, job.params, job.id, options, job.skip_special_tokens, job.marks)
        readers: dict[int, OutputReader] = {}
        self._owners[job.id] = job.client.name
        try:
            async with aclosing(stream):
                async for news in stream:
                    if news.index not in readers:
                        readers[news.index] = OutputReader(job.expected, f"{job.id}/{news.index}")
                    delta = readers[news.index].read(news)
                    if job.turn is not None:
                        await job.turn.observe(delta)
                    self._metrics.observe(delta, arrival, last)
                    _account(job.client, delta)
                    failure = delta.ended.failure if delta.ended else None
                    if failure is not None and failure.kind != Aborted.__name__:
                        raise failure.error()
                    yield delta
        except BadRequest as error:
            if error.field == "prompt":
                error.field = job.prompt_field  # the engine says prompt; the client's body may call it messages
            raise
        finally:
            self._owners.pop(job.id, None)

    def check_outputs(self, prompts: int, n: int, prompt_field: str) -> None:
        """Raise InvalidParameter if there are too many outputs for one request."""
        if prompts * n > self._output_limit:
            field = "n" if n > 1 else prompt_field
            raise InvalidParameter(field, f"asks for {prompts * n} outputs, the limit is {self._output_limit}")

    def _check_biases(self, job: Job) -> None:
        size = self._engine.info.vocab_size
        unknown = next((token for token in job.params.logit_bias if not 0 <= token < size), None)
        if unknown is not None:
            raise InvalidParameter("logit_bias", f"token id {unknown} is outside the vocabulary of {size}")

    def is_running(self, request_id: str, client: Client) -> bool:
        """Return whether it is the id of a running job that the client may use."""
        return request_id in self._owners and client.may_use(self._owners[request_id])

    def abort(self, request_id: str, client: Client) -> None:
        """End a client's own job. Does nothing if it has none with this id."""
        if self.is_running(request_id, client):
            self._engine.abort(request_id)

    async def gather(self, job: Job) -> list[Output]:
        """Run a job and return its complete outputs."""
        outputs = [Output() for _ in range(len(job.prompts) * job.params.n)]
        async with aclosing(self.deltas(job)) as stream:
            async for delta in stream:
                outputs[delta.index].add(delta)
        return outputs


def _account(client: Client, delta: Delta) -> None:
    """Charge the delta to the client's quota and its request's record."""
    if client.record is not None and delta.tokens:
        client.record.sampled()
    if delta.ended is None:
        return
    if client.record is not None:
        client.record.ended(delta.ended)
    if client.usage is not None:
        client.usage.spend(delta.ended.prompt_tokens + delta.ended.output_tokens)


def session_field(job: Job) -> dict[str, str]:
    """Return the session's field of an answer."""
    return {} if job.turn is None else {"session_id": job.turn.session_id}


def usage(ends: Sequence[Ended], job: Job, reasoning_tokens: int = 0) -> dict[str, Any]:
    """Return the usage of outputs with these `ends`. A prompt counts once, with its first output's cache hits."""
    prompts = ends[:: job.params.n]
    prompt = sum(end.prompt_tokens for end in prompts)
    completion = sum(end.output_tokens for end in ends)
    by_tier: Counter[str] = Counter()
    for end in prompts:
        by_tier.update(end.cached_by_tier)
    cached = sum(end.cached_tokens for end in prompts)
    details: dict[str, Any] = {"cached_tokens": cached, "cached_tokens_by_tier": {"device": 0, **by_tier}}
    if job.options.retention is not None:
        details["retained_tokens"] = sum(end.retained_tokens for end in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "reasoning_tokens": reasoning_tokens,
    }
