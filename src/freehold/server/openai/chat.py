"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response

from freehold.contract.errors import InvalidParameter
from freehold.contract.step import TokenLogprobs
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Ended
from freehold.ipc.streams import Delta
from freehold.server.access.clients import client_of
from freehold.server.answers.served_format import ServedFormat
from freehold.server.answers.tools import offer_of
from freehold.server.answers.wanted import WantedAnswer
from freehold.server.openai.schema import ChatBody, for_template, up_to_breakpoint
from freehold.server.requests.hints import tokens_before
from freehold.server.requests.job import Generator, Job, Output, session_field, usage
from freehold.server.requests.response import respond
from freehold.server.router import router
from freehold.server.served_models import ServedModels
from freehold.server.sessions.table import SessionTable
from freehold.server.sessions.turns import begin_chat, turn_of
from freehold.text.answers.answer import Answer
from freehold.text.answers.events import CallStart, Content, Event, Reasoning
from freehold.text.tokenizer import Tokenizer


def chat_routes(
    engine: AsyncEngine, generator: Generator, sessions: SessionTable, models: ServedModels, served: ServedFormat
) -> APIRouter:
    routes = router()

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response | dict[str, Any]:
        model, adapter = models.choose(body.model, body.lora_path)
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidParameter("top_logprobs", "needs logprobs to be true")
        tokenizer = engine.tokenizer
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = body.sampling(tokenizer.defaults, limit, logprobs)
        wanted = WantedAnswer(
            served,
            offer_of(body.tools, body.tool_choice, body.parallel_tool_calls),
            params.constraint,
            body.thinking_budget,
            separates_thoughts=body.separate_reasoning is not False,
        )
        rendering, client = replace(body.rendering, tools=wanted.offer.shown), client_of(request)
        async with turn_of(sessions, request, body, params) as turn:
            if turn is not None:
                text = await begin_chat(turn, sessions, engine, body.messages, rendering)
                turn.adapter = adapter
                prompt, params = turn.tokens, turn.fitted(params)
                options = turn.options(body.options(client, adapter, body.retained(None)))
            else:
                text = rendering.text(tokenizer, for_template(body.messages))
                prompt = await engine.encode(text, add_special_tokens=False)
                marked = up_to_breakpoint(body.messages)
                end = None if marked is None else await tokens_before(engine, prompt, rendering, marked)
                options = body.options(client, adapter, body.retained(len(prompt), end))
            params = replace(params, constraint=wanted.constraint(text))
            name, skip = f"chatcmpl-{uuid.uuid4().hex}", body.skip_special_tokens is not False
            job = Job(name, [prompt], params, options, "messages", client, skip, turn, wanted.expected(text))
            return await respond(request, _Answer(generator, job, body, tokenizer, model), body.stream, turn)

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
                "message": _message(output.answer),
                "logprobs": self._logprobs(output.logprobs),
                "finish_reason": _finish_reason(output.end, bool(output.answer.calls)),
                "matched_stop": output.end.matched,
            }
            for i, output in enumerate(outputs)
        ]
        counted = usage([output.end for output in outputs], self._job, sum(one.reasoning_tokens for one in outputs))
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": counted}

    async def stream(self) -> AsyncGenerator[dict[str, Any]]:
        """Stream the role, then content, then the finish reason, and usage if requested."""
        outputs: dict[int, Output] = {}
        waiting = _Waiting(self._body.stream_reasoning is not False)
        async with aclosing(self._generator.deltas(self._job)) as deltas:
            async for delta in deltas:
                if delta.index not in outputs:
                    outputs[delta.index] = Output()
                    yield self._chunk(delta.index, {"role": "assistant", "content": ""})
                output = outputs[delta.index]
                output.add(delta)
                said = [_said(event) for event in waiting.release(delta)]
                if delta.logprobs and not said:
                    said = [{"content": ""}]
                for i, part in enumerate(said):
                    yield self._chunk(delta.index, part, delta.logprobs if i == 0 else [])
                if delta.ended:
                    yield self._chunk(delta.index, {}, end=delta.ended, has_calls=bool(output.answer.calls))
        if self._body.wants_usage:
            ends = [outputs[i].end for i in sorted(outputs)]
            counted = usage(ends, self._job, sum(one.reasoning_tokens for one in outputs.values()))
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": counted}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprobs] = (),
        end: Ended | None = None,
        has_calls: bool = False,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": {"reasoning_content": None, **delta},
            "logprobs": self._logprobs(logprobs),
            "finish_reason": _finish_reason(end, has_calls) if end else None,
            "matched_stop": end.matched if end else None,
        }
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs(self, found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
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


class _Waiting:
    """Holds back thoughts that are not streamed until they are complete."""

    def __init__(self, streams_thoughts: bool):
        self._streams_thoughts = streams_thoughts
        self._thoughts: dict[int, str] = {}

    def release(self, delta: Delta) -> list[Event]:
        """Return the delta's events that can be sent now."""
        if self._streams_thoughts:
            return delta.events
        waiting = self._thoughts.pop(delta.index, "")
        waiting += "".join(event.text for event in delta.events if isinstance(event, Reasoning))
        others: list[Event] = [event for event in delta.events if not isinstance(event, Reasoning)]
        if waiting and (others or delta.ended):
            return [Reasoning(waiting), *others]
        if waiting:
            self._thoughts[delta.index] = waiting
        return others


def _message(answer: Answer) -> dict[str, Any]:
    calls = [call.as_openai() for call in answer.calls]
    return {
        "role": "assistant",
        "content": None if calls and not answer.content else answer.content,
        "reasoning_content": answer.reasoning or None,
        "reasoning": answer.reasoning or None,
        "tool_calls": calls or None,
    }


def _said(event: Event) -> dict[str, Any]:
    """Format an event as a chunk's delta. A call's id and name are sent once."""
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text, "reasoning": event.text}
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def _finish_reason(end: Ended, has_calls: bool) -> str:
    return "tool_calls" if has_calls and end.kind == "stop" else end.kind
