"""POST /v1/messages, compatible with Anthropic's API, on the same internals as chat completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Ended, Options
from freehold.server.access.clients import client_of
from freehold.server.answers.messages import check_calls
from freehold.server.answers.served_format import ServedFormat
from freehold.server.answers.wanted import WantedAnswer
from freehold.server.anthropic.block_stream import BlockStream
from freehold.server.anthropic.schema import CountBody, MessagesBody
from freehold.server.requests.hints import tokens_before
from freehold.server.requests.job import Generator, Job
from freehold.server.requests.prompt import Rendering
from freehold.server.requests.response import ANTHROPIC_EVENTS, respond
from freehold.server.router import router
from freehold.server.served_models import ServedModels


def anthropic_routes(
    engine: AsyncEngine, generator: Generator, models: ServedModels, served: ServedFormat
) -> APIRouter:
    routes = router()

    @routes.post("/v1/messages", response_model=None)
    async def messages(body: MessagesBody, request: Request) -> Response | dict[str, Any]:
        model, adapter = models.choose(body.model)
        tokenizer = engine.tokenizer
        wanted = WantedAnswer(
            served, body.offer(), None, body.thinking_budget, "thinking.budget_tokens",
            separates_thoughts=body.thinking is None or body.thinking.type != "disabled",
        )  # fmt: skip
        turns = body.turns()
        check_calls(turns)
        rendering = Rendering(continues_answer=True, variables=body.template_variables, tools=wanted.offer.shown)
        text = rendering.text(tokenizer, turns)
        params = replace(body.sampling(tokenizer.defaults), constraint=wanted.constraint(text))
        prompt = await engine.encode(text, add_special_tokens=False)
        retention = None
        if (marked := body.up_to_breakpoint()) is not None:
            start, control = marked
            retention = control.retention(await tokens_before(engine, prompt, rendering, start.turns()))
        client = client_of(request)
        options = Options(namespace=client.namespace(None), retention=retention, adapter=adapter)
        name = f"msg_{uuid.uuid4().hex}"
        job = Job(name, [prompt], params, options, "messages", client, expected=wanted.expected(text))
        answer = _Answer(generator, job, model)
        return await respond(request, answer, body.stream, events=ANTHROPIC_EVENTS)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody) -> dict[str, int]:
        rendering = Rendering(variables=body.template_variables, tools=body.offer().shown)
        return {"input_tokens": len(await rendering.tokens(engine, body.turns()))}

    return routes


class _Answer:
    def __init__(self, generator: Generator, job: Job, model: str):
        self._generator = generator
        self._job = job
        self._head = {"id": job.id, "type": "message", "role": "assistant", "model": model}

    def _usage(self, cached: int, output: int) -> dict[str, int]:
        """Split the prompt's tokens three ways: read from the cache, retained for `cache_control`, and the rest."""
        prompt, retention = len(self._job.prompts[0]), self._job.options.retention
        created = 0 if retention is None else max((retention.end or 0) - cached, 0)
        usage = {
            "input_tokens": prompt - cached - created,
            "output_tokens": output,
            "cache_creation_input_tokens": created,
        }
        return {**usage, "cache_read_input_tokens": cached} if cached else usage

    async def whole(self) -> dict[str, Any]:
        blocks = BlockStream()
        ended: Ended | None = None
        async with aclosing(self._generator.deltas(self._job)) as deltas:
            async for delta in deltas:
                blocks.add(delta.events)
                ended = delta.ended or ended
        assert ended is not None
        return {
            **self._head,
            "content": blocks.whole(),
            **_stop(ended, blocks.has_calls),
            "usage": self._usage(ended.cached_tokens, ended.output_tokens),
        }

    async def stream(self) -> AsyncGenerator[dict[str, Any]]:
        blocks = BlockStream()
        has_begun = False
        async with aclosing(self._generator.deltas(self._job)) as deltas:
            async for delta in deltas:
                if not has_begun:
                    has_begun = True
                    usage = self._usage(delta.cached_tokens, 0)
                    empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
                    yield {"type": "message_start", "message": {**self._head, **empty}}
                for event in blocks.add(delta.events):
                    yield event
                if delta.ended is not None:
                    for event in blocks.finish():
                        yield event
                    usage = self._usage(delta.ended.cached_tokens, delta.ended.output_tokens)
                    yield {"type": "message_delta", "delta": _stop(delta.ended, blocks.has_calls), "usage": usage}
        yield {"type": "message_stop"}


def _stop(ended: Ended, has_calls: bool) -> dict[str, Any]:
    sequence = ended.matched if isinstance(ended.matched, str) else None
    if ended.kind == "length":
        reason = "max_tokens"
    elif sequence is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if has_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}
