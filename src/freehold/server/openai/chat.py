"""POST /v1/chat/completions"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from freehold.errors import InvalidParameter
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Ended
from freehold.server.access.clients import client_of
from freehold.server.openai.schema import ChatBody, up_to_breakpoint
from freehold.server.requests.hints import tokens_before
from freehold.server.requests.job import Generator, Job, session_field, usage
from freehold.server.requests.prompt import Rendering
from freehold.server.requests.response import respond
from freehold.server.router import router
from freehold.server.served_models import ServedModels
from freehold.server.sessions.table import SessionTable
from freehold.server.sessions.turns import begin_chat_turn, session_of
from freehold.step import TokenLogprobs
from freehold.text.tokenizer import Tokenizer


def chat_routes(engine: AsyncEngine, generator: Generator, sessions: SessionTable, models: ServedModels) -> APIRouter:
    routes = router()

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response | dict[str, Any]:
        model = models.name(body.model)
        if body.tools and body.tool_choice != "none":
            raise InvalidParameter("tools", "tool calls are not supported")
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidParameter("top_logprobs", "needs logprobs to be true")
        tokenizer = engine.tokenizer
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = body.sampling(tokenizer.defaults, limit, logprobs)
        rendering = Rendering(body.add_generation_prompt is not False, variables=body.chat_template_kwargs or {})
        name = f"chatcmpl-{uuid.uuid4().hex}"
        skip = body.skip_special_tokens is not False
        client = client_of(request)
        session = await session_of(sessions, client, body, params)
        if session is not None:
            options = body.options(client, body.retained(None), (session.key, session.settings.namespace))
            turn = await begin_chat_turn(sessions, session, engine, body.messages, rendering)
            job = Job(
                name, [np.array(turn.tokens, np.int32)], turn.fitted(params), options, "messages", client, skip, turn
            )
        else:
            prompt = await rendering.tokens(engine, [message.for_template() for message in body.messages])
            marked = up_to_breakpoint(body.messages)
            end = None if marked is None else await tokens_before(engine, prompt, marked)
            options = body.options(client, body.retained(len(prompt), end))
            job = Job(name, [prompt], params, options, "messages", client, skip)
        answer = _Answer(generator, job, body, tokenizer, model)
        return await respond(request, answer, body.stream, job.turn)

    return routes


class _Answer:
    def __init__(self, generator: Generator, job: Job, body: ChatBody, tokenizer: Tokenizer, model: str):
        self._generator = generator
        self._job = job
        self._body = body
        self._tokenizer = tokenizer
        self._head = {"id": job.id, "created": int(time.time()), "model": model}
        self._head.update(session_field(job))

    async def whole(self) -> dict[str, Any]:
        outputs = await self._generator.gather(self._job)
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": output.text, "reasoning_content": None},
                "logprobs": self._logprobs(output.logprobs),
                "finish_reason": output.end.kind,
                "matched_stop": output.end.matched,
            }
            for i, output in enumerate(outputs)
        ]
        counted = usage([output.end for output in outputs], self._job)
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": counted}

    async def stream(self) -> AsyncGenerator[dict[str, Any]]:
        """A chunk with the role, chunks with text, a chunk with the reason, and the usage if asked for."""
        ends: dict[int, Ended] = {}
        begun: set[int] = set()
        async with aclosing(self._generator.deltas(self._job)) as deltas:
            async for delta in deltas:
                if delta.index not in begun:
                    begun.add(delta.index)
                    yield self._chunk(delta.index, {"role": "assistant", "content": ""})
                if delta.text or delta.logprobs:
                    yield self._chunk(delta.index, {"content": delta.text}, delta.logprobs)
                if delta.ended:
                    ends[delta.index] = delta.ended
                    yield self._chunk(delta.index, {}, end=delta.ended)
        if self._body.wants_usage:
            counted = usage([ends[i] for i in sorted(ends)], self._job)
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": counted}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: list[TokenLogprobs] | None = None, end: Ended | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": {**delta, "reasoning_content": None},
            "logprobs": self._logprobs(logprobs or []),
            "finish_reason": end.kind if end else None,
            "matched_stop": end.matched if end else None,
        }
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs(self, found: list[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            piece = self._tokenizer.piece(token, False)
            return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}

        return {
            "content": [
                {**entry(one.token, one.logprob), "top_logprobs": [entry(*top) for top in one.top]} for one in found
            ]
        }
