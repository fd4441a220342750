"""POST /v1/messages, compatible with Anthropic's API, on the same internals as chat completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from freehold.arrays import Int32
from freehold.sampling_params import InvalidParameter
from freehold.server.async_engine import AsyncEngine
from freehold.server.errors import anthropic_error, as_api_error
from freehold.server.generation import Generator, Job, encode, unless_disconnected
from freehold.server.messages import Ended
from freehold.server.messages_schema import CountBody, MessagesBody
from freehold.text.tokenizer import Tokenizer


def anthropic_routes(engine: AsyncEngine, generator: Generator, model_name: str) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages", response_model=None)
    async def messages(body: MessagesBody, request: Request) -> Response | dict[str, Any]:
        params = body.sampling(engine.tokenizer.defaults)
        prompt = await _prompt(engine.tokenizer, body)
        job = Job(f"msg_{uuid.uuid4().hex}", [prompt], params, 0, "", True, "messages")
        answer = _Answer(job, body.model or model_name)
        if body.stream:
            return await answer.respond(generator)
        return await unless_disconnected(request, answer.whole(generator))

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody) -> dict[str, int]:
        return {"input_tokens": len(await _prompt(engine.tokenizer, body))}

    return router


async def _prompt(tokenizer: Tokenizer, body: CountBody) -> Int32:
    """Raises InvalidParameter or ChatTemplateError."""
    if tokenizer.chat_template is None:
        raise InvalidParameter("messages", "the model has no chat template")
    return await encode(tokenizer, tokenizer.chat_template.render(body.turns(), True), add_special_tokens=False)


class _Answer:
    def __init__(self, job: Job, model: str):
        self._job = job
        self._head = {"id": job.id, "type": "message", "role": "assistant", "model": model}

    def _usage(self, cached: int, output: int) -> dict[str, int]:
        """At least one prompt token is always computed, so `input_tokens` is positive."""
        prompt = len(self._job.prompts[0])
        usage = {"input_tokens": prompt - cached, "output_tokens": output, "cache_creation_input_tokens": 0}
        return {**usage, "cache_read_input_tokens": cached} if cached else usage

    async def whole(self, generator: Generator) -> dict[str, Any]:
        (output,) = await generator.gather(self._job)
        return {
            **self._head,
            "content": [{"type": "text", "text": output.text}],
            **_stop(output.end),
            "usage": self._usage(output.end.cached_tokens, output.end.output_tokens),
        }

    async def respond(self, generator: Generator) -> Response:
        """What goes wrong before the first event is an ordinary error."""
        events = self._events(generator)
        first = await anext(events)

        async def encoded() -> AsyncGenerator[bytes]:
            async with aclosing(events) as rest:
                yield _encode(first)
                try:
                    async for event in rest:
                        yield _encode(event)
                except Exception as error:
                    failure = as_api_error(error)
                    yield _encode(anthropic_error(failure.status, failure.message))

        return StreamingResponse(encoded(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _events(self, generator: Generator) -> AsyncGenerator[dict[str, Any]]:
        has_begun = False
        async with aclosing(generator.deltas(self._job)) as deltas:
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
    return {"stop_reason": "max_tokens" if ended.kind == "length" else "end_turn", "stop_sequence": sequence}


def _encode(event: dict[str, Any]) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
