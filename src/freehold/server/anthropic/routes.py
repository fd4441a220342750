"""POST /v1/messages, compatible with Anthropic's API, on the same internals as chat completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Ended, Options
from freehold.server.access.clients import client_of
from freehold.server.anthropic.schema import CountBody, MessagesBody
from freehold.server.requests.hints import tokens_before
from freehold.server.requests.job import Generator, Job
from freehold.server.requests.prompt import Rendering
from freehold.server.requests.response import ANTHROPIC_EVENTS, respond
from freehold.server.router import router
from freehold.server.served_models import ServedModels


def anthropic_routes(engine: AsyncEngine, generator: Generator, models: ServedModels) -> APIRouter:
    routes = router()

    @routes.post("/v1/messages", response_model=None)
    async def messages(body: MessagesBody, request: Request) -> Response | dict[str, Any]:
        model = models.name(body.model)
        tokenizer = engine.tokenizer
        params = body.sampling(tokenizer.defaults)
        prompt = await Rendering(continues_answer=True).tokens(engine, body.turns())
        retention = None
        if (marked := body.up_to_breakpoint()) is not None:
            start, control = marked
            retention = control.retention(await tokens_before(engine, prompt, start.turns()))
        client = client_of(request)
        options = Options(namespace=client.namespace(None), retention=retention)
        job = Job(f"msg_{uuid.uuid4().hex}", [prompt], params, options, "messages", client)
        answer = _Answer(generator, job, model)
        return await respond(request, answer, body.stream, events=ANTHROPIC_EVENTS)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody) -> dict[str, int]:
        return {"input_tokens": len(await Rendering().tokens(engine, body.turns()))}

    return routes


class _Answer:
    def __init__(self, generator: Generator, job: Job, model: str):
        self._generator = generator
        self._job = job
        self._head = {"id": job.id, "type": "message", "role": "assistant", "model": model}

    def _usage(self, cached: int, output: int) -> dict[str, int]:
        """The prompt's tokens in three parts: read from the cache, kept in it because `cache_control` asked for that,
        and the others."""
        prompt, retention = len(self._job.prompts[0]), self._job.options.retention
        created = 0 if retention is None else max((retention.end or 0) - cached, 0)
        usage = {
            "input_tokens": prompt - cached - created,
            "output_tokens": output,
            "cache_creation_input_tokens": created,
        }
        return {**usage, "cache_read_input_tokens": cached} if cached else usage

    async def whole(self) -> dict[str, Any]:
        (output,) = await self._generator.gather(self._job)
        return {
            **self._head,
            "content": [{"type": "text", "text": output.text}],
            **_stop(output.end),
            "usage": self._usage(output.end.cached_tokens, output.end.output_tokens),
        }

    async def stream(self) -> AsyncGenerator[dict[str, Any]]:
        has_begun = False
        async with aclosing(self._generator.deltas(self._job)) as deltas:
            async for delta in deltas:
                if not has_begun:
                    has_begun = True
                    usage = self._usage(delta.cached_tokens, 0)
                    empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
                    yield {"type": "message_start", "message": {**self._head, **empty}}
                    block = {"type": "text", "text": ""}
                    yield {"type": "content_block_start", "index": 0, "content_block": block}
                if delta.text:
                    text = {"type": "text_delta", "text": delta.text}
                    yield {"type": "content_block_delta", "index": 0, "delta": text}
                if delta.ended is not None:
                    yield {"type": "content_block_stop", "index": 0}
                    usage = self._usage(delta.ended.cached_tokens, delta.ended.output_tokens)
                    yield {"type": "message_delta", "delta": _stop(delta.ended), "usage": usage}
        yield {"type": "message_stop"}


def _stop(ended: Ended) -> dict[str, Any]:
    sequence = ended.matched if isinstance(ended.matched, str) else None
    reason = "max_tokens" if ended.kind == "length" else "end_turn" if sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sequence}
