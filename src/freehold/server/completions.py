"""POST /v1/completions"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from freehold.arrays import Int32
from freehold.llm import check_token_ids
from freehold.sampling_params import InvalidParameter, SamplingParams
from freehold.server.async_engine import AsyncEngine
from freehold.server.generation import (
    Generator,
    Job,
    closing_unless_streaming,
    encode,
    ending_turn,
    event_stream,
    session_field,
    unless_disconnected,
    usage,
)
from freehold.server.messages import Ended
from freehold.server.schema import CompletionBody
from freehold.server.sessions import SessionTable, Turn
from freehold.server.turns import session_of
from freehold.step import TokenLogprobs
from freehold.text.tokenizer import Tokenizer


def completion_routes(engine: AsyncEngine, generator: Generator, sessions: SessionTable, model_name: str) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response | dict[str, Any]:
        if body.suffix:
            raise InvalidParameter("suffix", "is not supported")
        if body.echo and body.logprobs is not None:
            raise InvalidParameter("echo", "together with logprobs is not supported")
        params = body.sampling(engine.tokenizer.defaults, body.max_tokens, body.logprobs)
        prompts = await _prompts(body, engine)
        turn = await _begin_turn(body, params, prompts)
        with closing_unless_streaming(turn) as keep_open:
            if turn is not None:
                prompts = [np.array(turn.tokens, np.int32)]
            job = Job.of(f"cmpl-{uuid.uuid4().hex}", prompts, params, body, "prompt", turn)
            answer = _Answer(job, body, engine.tokenizer, model_name)
            if body.stream:
                response = await event_stream(ending_turn(turn, answer.stream(generator)))
                keep_open()
                return response
            return await unless_disconnected(request, answer.whole(generator))

    async def _begin_turn(body: CompletionBody, params: SamplingParams, prompts: list[Int32]) -> Turn | None:
        session = await session_of(sessions, body, params)
        if session is None:
            return None
        if len(prompts) != 1:
            raise InvalidParameter("prompt", "must be one prompt for a turn of a session")
        return sessions.begin(session, prompts[0].tolist())

    return router


async def _prompts(body: CompletionBody, engine: AsyncEngine) -> list[Int32]:
    prompt = body.prompt
    many = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    if not many or many == [[]]:
        raise InvalidParameter("prompt", "must not be empty")
    return [
        await encode(engine.tokenizer, one, True)
        if isinstance(one, str)
        else check_token_ids(one, engine.info.vocab_size)  # pyright: ignore[reportArgumentType]
        for one in many
    ]


class _Answer:
    def __init__(self, job: Job, body: CompletionBody, tokenizer: Tokenizer, model_name: str):
        self._job = job
        self._body = body
        self._tokenizer = tokenizer
        self._head = {
            "id": job.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or model_name,
            **session_field(job),
        }

    def _echo(self, index: int) -> str:
        if not self._body.echo:
            return ""
        return self._tokenizer.decode(self._job.prompts[index // self._job.params.n].tolist())

    async def whole(self, generator: Generator) -> dict[str, Any]:
        outputs = await generator.gather(self._job)
        choices = [
            self._choice(i, self._echo(i) + output.text, output.logprobs, output.end)
            for i, output in enumerate(outputs)
        ]
        return {**self._head, "choices": choices, "usage": usage([o.end for o in outputs], self._job.params.n)}

    async def stream(self, generator: Generator) -> AsyncGenerator[dict[str, Any]]:
        ends: dict[int, Ended] = {}
        echoed: set[int] = set()
        async with aclosing(generator.deltas(self._job)) as deltas:
            async for delta in deltas:
                if delta.ended:
                    ends[delta.index] = delta.ended
                text = delta.text if delta.index in echoed else self._echo(delta.index) + delta.text
                echoed.add(delta.index)
                if text or delta.ended or delta.logprobs:
                    choice = self._choice(delta.index, text, delta.logprobs, delta.ended)
                    yield {**self._head, "choices": [choice]}
        if self._body.wants_usage:
            counted = usage([ends[i] for i in sorted(ends)], self._job.params.n)
            yield {**self._head, "choices": [], "usage": counted}

    def _choice(self, index: int, text: str, logprobs: list[TokenLogprobs], end: Ended | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(logprobs) if self._body.logprobs is not None else None,
            "finish_reason": end.kind if end else None,
            "matched_stop": end.matched if end else None,
        }

    def _logprobs(self, found: list[TokenLogprobs]) -> dict[str, Any]:
        def text(token: int) -> str:
            return self._tokenizer.piece(token, False).decode(errors="replace")

        pieces = [text(entry.token) for entry in found]
        ends = [len("".join(pieces[:i])) for i in range(len(pieces))]
        return {
            "tokens": pieces,
            "token_logprobs": [entry.logprob for entry in found],
            "top_logprobs": [{text(token): value for token, value in entry.top} for entry in found],
            "text_offset": ends,
        }
