"""POST /v1/completions."""

from __future__ import annotations

import itertools
import math
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from freehold.contract.arrays import Int32
from freehold.contract.errors import InvalidParameter
from freehold.contract.step import TokenLogprobs
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Ended
from freehold.ipc.streams import Delta
from freehold.server.access.clients import client_of
from freehold.server.openai.schema import CompletionBody
from freehold.server.requests.job import Generator, Job, Output, session_field, usage
from freehold.server.requests.prompt import tokens_of
from freehold.server.requests.response import respond
from freehold.server.router import router
from freehold.server.served_models import ServedModels
from freehold.server.sessions.table import SessionTable
from freehold.server.sessions.turns import turn_of
from freehold.text.tokenizer import Tokenizer


def completion_routes(
    engine: AsyncEngine, generator: Generator, sessions: SessionTable, models: ServedModels
) -> APIRouter:
    routes = router()

    @routes.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response | dict[str, Any]:
        model, adapter = models.choose(body.model, body.lora_path)
        if body.suffix:
            raise InvalidParameter("suffix", "is not supported")
        echo = bool(body.echo) and body.session_id is None
        params = body.sampling(engine.tokenizer.defaults, body.max_tokens, body.logprobs, echo)
        client = client_of(request)
        generator.check_outputs(len(body.prompts), params.n, "prompt")
        if body.session_id is not None and len(body.prompts) != 1:
            raise InvalidParameter("prompt", "must be one prompt for a turn of a session")
        name, skip = f"cmpl-{uuid.uuid4().hex}", body.skip_special_tokens is not False
        async with turn_of(sessions, request, body, params) as turn:
            prompts = await tokens_of(body.prompts, "prompt", engine, turn is not None)
            if turn is None:
                options = body.options(client, adapter, body.retained(max(map(len, prompts))))
            else:
                options = turn.options(body.options(client, adapter, body.retained(None)))
                turn.begin(await sessions.conversation(turn.session), prompts[0])
                turn.adapter = adapter
                prompts, params = [turn.tokens], turn.fitted(params)
            job = Job(name, prompts, params, options, "prompt", client, skip, turn)
            answer = _Answer(generator, job, body, engine.tokenizer, model)
            return await respond(request, answer, body.stream, turn)

    return routes


class _Answer:
    def __init__(self, generator: Generator, job: Job, body: CompletionBody, tokenizer: Tokenizer, model: str):
        self._generator = generator
        self._job = job
        self._body = body
        self._tokenizer = tokenizer
        self._head = {
            "id": job.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            **session_field(job),
        }

    def _prompt(self, index: int) -> Int32:
        return self._job.prompts[index // self._job.params.n]

    def _echo(self, index: int) -> str:
        return self._tokenizer.decode(self._prompt(index).tolist()) if self._body.echo else ""

    async def whole(self) -> dict[str, Any]:
        outputs = await self._generator.gather(self._job)
        choices = [
            self._choice(i, self._echo(i) + output.text, self._scored(i, output), output.end)
            for i, output in enumerate(outputs)
        ]
        return {**self._head, "choices": choices, "usage": usage([o.end for o in outputs], self._job)}

    async def stream(self) -> AsyncGenerator[dict[str, Any]]:
        ends: dict[int, Ended] = {}
        echoed: set[int] = set()
        async with aclosing(self._generator.deltas(self._job)) as deltas:
            async for delta in deltas:
                if delta.ended:
                    ends[delta.index] = delta.ended
                is_first = delta.index not in echoed
                echoed.add(delta.index)
                text = self._echo(delta.index) + delta.text if is_first else delta.text
                scored = self._scored(delta.index, delta) if is_first else delta.logprobs
                if text or delta.ended or scored:
                    choice = self._choice(delta.index, text, scored, delta.ended)
                    yield {**self._head, "choices": [choice]}
        if self._body.wants_usage:
            counted = usage([ends[i] for i in sorted(ends)], self._job)
            yield {**self._head, "choices": [], "usage": counted}

    def _scored(self, index: int, output: Output | Delta) -> list[TokenLogprobs]:
        """Return log-probabilities, including the prompt's if echoed. Its first token has none."""
        if self._job.params.prompt_logprobs_start is None:
            return output.logprobs
        first = TokenLogprobs(int(self._prompt(index)[0]), math.nan, [])
        return [first, *output.prompt_logprobs, *output.logprobs]

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
        lengths = [len(piece) for piece in pieces]
        return {
            "tokens": pieces,
            "token_logprobs": [None if math.isnan(entry.logprob) else entry.logprob for entry in found],
            "top_logprobs": [
                None if math.isnan(entry.logprob) else {text(token): value for token, value in entry.top}
                for entry in found
            ],
            "text_offset": [end - length for end, length in zip(itertools.accumulate(lengths), lengths, strict=True)],
        }
