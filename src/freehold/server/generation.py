"""What completions and chat share: outputs gathered, streamed, counted; clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
from fastapi import Request
from fastapi.responses import StreamingResponse

from freehold.arrays import Int32
from freehold.sampling_params import InvalidParameter, SamplingParams
from freehold.server.async_engine import AsyncEngine, Delta
from freehold.server.errors import ApiError, as_api_error, error_body
from freehold.server.messages import Ended
from freehold.server.metrics import Metrics
from freehold.server.schema import SamplingBody
from freehold.server.sessions import Turn
from freehold.step import TokenLogprobs
from freehold.text.tokenizer import Tokenizer

LONG_TEXT = 20_000  # characters; longer ones are tokenized off the event loop

Result = TypeVar("Result")


@dataclass
class Output:
    """One finished output."""

    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    ended: Ended | None = None

    @property
    def end(self) -> Ended:
        assert self.ended is not None
        return self.ended


@dataclass(frozen=True)
class Job:
    """A validated request of any route, ready to run. `id` is the response's."""

    id: str
    prompts: list[Int32]
    params: SamplingParams
    priority: int
    namespace: str
    skip_special_tokens: bool
    prompt_field: str  # what the body calls the prompt
    timeout: float | None = None  # seconds
    turn: Turn | None = None  # of a session

    @classmethod
    def of(
        cls,
        name: str,
        prompts: list[Int32],
        params: SamplingParams,
        body: SamplingBody,
        prompt_field: str,
        turn: Turn | None = None,
    ) -> Job:
        if any(len(prompt) == 0 for prompt in prompts):
            raise InvalidParameter(prompt_field, "must not be empty")
        skip = body.skip_special_tokens is not False
        if body.timeout is not None and body.timeout <= 0:
            raise InvalidParameter("timeout", f"must be positive, got {body.timeout:g}")
        salt, priority = body.cache_salt or "", body.priority or 0
        if turn is not None:
            salt = turn.session.settings.namespace
        return cls(name, prompts, params, priority, salt, skip, prompt_field, body.timeout, turn)


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Int32:
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)


class Generator:
    """Runs jobs and keeps the latency metrics."""

    def __init__(self, engine: AsyncEngine, metrics: Metrics):
        self._engine = engine
        self._metrics = metrics

    async def deltas(self, job: Job) -> AsyncGenerator[Delta]:
        """The job's news. An output that ended with an error raises ApiError, except beside others that
        did not."""
        arrival = time.monotonic()
        last: dict[int, float] = {}
        session = None
        if job.turn is not None:
            job.turn.request_id, session = job.id, job.turn.session.id
        stream = self._engine.stream(
            job.prompts, job.params, job.id, job.priority, job.namespace, job.skip_special_tokens, job.timeout, session
        )
        async with aclosing(stream):
            async for delta in self._named(stream, job.prompt_field):
                if job.turn is not None:
                    job.turn.observe(delta.tokens, delta.text, delta.ended)
                self._metrics.observe(delta, arrival, last)
                if delta.ended and delta.ended.kind == "error":
                    raise ApiError(400 if "KV memory" in delta.ended.message else 500, delta.ended.message)
                if delta.ended and delta.ended.kind == "timeout":
                    raise ApiError(503, delta.ended.message, "timeout")
                yield delta

    async def _named(self, stream: AsyncGenerator[Delta], prompt_field: str) -> AsyncGenerator[Delta]:
        """The engine knows a prompt; the client's body may call it messages."""
        try:
            async for delta in stream:
                yield delta
        except InvalidParameter as error:
            raise ApiError(400, str(error), prompt_field if error.field == "prompt" else error.field) from error

    async def gather(self, job: Job) -> list[Output]:
        """All outputs, whole."""
        outputs = [Output() for _ in range(len(job.prompts) * job.params.n)]
        async with aclosing(self.deltas(job)) as stream:
            async for delta in stream:
                output = outputs[delta.index]
                output.text += delta.text
                output.tokens += delta.tokens
                output.logprobs += delta.logprobs
                output.ended = delta.ended or output.ended
        return outputs


async def unless_disconnected(request: Request, work: Any) -> Any:
    """Await `work`, but cancel it when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has disconnected")
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@contextlib.contextmanager
def closing_unless_streaming(turn: Turn | None) -> Iterator[Callable[[], None]]:
    """Close the turn at the end of the block, unless what the block gives was called: then a stream does it."""
    is_kept = False

    def keep_open() -> None:
        nonlocal is_kept
        is_kept = True

    try:
        yield keep_open
    finally:
        if turn is not None and not is_kept:
            turn.close()


async def ending_turn(turn: Turn | None, chunks: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[dict[str, Any]]:
    """The same chunks; the turn is closed after them."""
    try:
        async with aclosing(chunks) as rest:
            async for chunk in rest:
                yield chunk
    finally:
        if turn is not None:
            turn.close()


def session_field(job: Job) -> dict[str, str]:
    """What answers say of the session."""
    return {} if job.turn is None else {"session_id": job.turn.session.id}


async def event_stream(chunks: AsyncGenerator[dict[str, Any]]) -> StreamingResponse:
    """Server-sent events. What goes wrong before the first event is an ordinary error."""
    first = await anext(chunks)

    async def events() -> AsyncGenerator[bytes]:
        async with aclosing(chunks) as rest:
            yield _event(first)
            try:
                async for chunk in rest:
                    yield _event(chunk)
            except Exception as error:
                failure = as_api_error(error)
                yield _event(error_body(failure.status, failure.message, failure.param))
            yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def usage(ends: Sequence[Ended], n: int) -> dict[str, Any]:
    """`ends` of all outputs, `n` for each prompt: a prompt counts once, with what its first output found
    in the cache."""
    prompts = ends[::n]
    prompt = sum(end.prompt_tokens for end in prompts)
    completion = sum(end.output_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in prompts)},
    }
