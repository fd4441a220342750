"""/v1/responses: create, stream, get, delete, cancel, input items."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from freehold.contract.arrays import Int32
from freehold.contract.errors import BadRequest
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Ended, Options
from freehold.server.access.clients import Client, client_of
from freehold.server.answers.messages import check_calls
from freehold.server.answers.served_format import ServedFormat
from freehold.server.answers.wanted import WantedAnswer
from freehold.server.requests.job import Generator, Job, Output, usage
from freehold.server.requests.prompt import Rendering
from freehold.server.requests.response import RESPONSES_EVENTS, respond
from freehold.server.responses.items import items_of, messages_of
from freehold.server.responses.output import OutputItems
from freehold.server.responses.schema import ResponsesBody
from freehold.server.responses.store import ResponseStore, StoredResponse
from freehold.server.router import router
from freehold.server.served_models import ServedModels
from freehold.server.sessions.continuation import continuation


@dataclass(frozen=True)
class _Turn:
    """The request, and the chat that it continues."""

    body: ResponsesBody
    client: Client
    model: str
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]  # of the chat, without instructions


def response_routes(
    engine: AsyncEngine, generator: Generator, models: ServedModels, served: ServedFormat, store: ResponseStore
) -> APIRouter:
    routes = router()

    def owner(client: Client) -> str | None:
        return None if client.is_admin else client.name

    @routes.post("/v1/responses", response_model=None)
    async def create(body: ResponsesBody, request: Request) -> Response | dict[str, Any]:
        (model, adapter), client = models.choose(body.model), client_of(request)
        body.check()
        items, field = items_of(body.input), "previous_response_id"
        before = None
        if body.previous_response_id is not None:
            before = await store.get(body.previous_response_id, owner(client), field)
        history, new = [] if before is None else before.messages, messages_of(items)
        check_calls(new, history, "input")
        wanted = WantedAnswer(served, body.offer(), body.form())
        rendering = Rendering(variables=_variables(body), tools=wanted.offer.shown)
        turn = _Turn(body, client, model, items, [*history, *new])
        text, prompt = await _prompt(engine, rendering, turn, before)
        params = replace(body.sampling(engine.tokenizer.defaults), constraint=wanted.constraint(text))
        options = Options(
            body.priority or 0, client.namespace(body.cache_salt), body.timeout, None, body.retained(len(prompt)),
            adapter=adapter,
        )  # fmt: skip
        name = f"resp_{uuid.uuid4().hex}"
        job = Job(name, [prompt], params, options, "input", client, expected=wanted.expected(text))
        return await respond(request, _Answer(generator, store, job, turn), body.stream, events=RESPONSES_EVENTS)

    @routes.get("/v1/responses/{name}")
    async def get(name: str, request: Request) -> dict[str, Any]:
        return (await store.get(name, owner(client_of(request)))).response

    @routes.delete("/v1/responses/{name}")
    async def delete(name: str, request: Request) -> dict[str, Any]:
        await store.get(name, owner(client_of(request)))
        await store.delete(name)
        return {"id": name, "object": "response", "deleted": True}

    @routes.get("/v1/responses/{name}/input_items")
    async def input_items(name: str, request: Request) -> dict[str, Any]:
        data = (await store.get(name, owner(client_of(request)))).items
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        return {"object": "list", "data": data, "has_more": False, **ends}

    @routes.post("/v1/responses/{name}/cancel")
    async def cancel(name: str, request: Request) -> dict[str, Any]:
        """Cancel a response that another connection streams."""
        client = client_of(request)
        if not generator.is_running(name, client):
            await store.get(name, owner(client))
            raise BadRequest("the response is complete", "response_id")
        generator.abort(name, client)
        return {"id": name, "object": "response", "status": "cancelled"}

    return routes


def _variables(body: ResponsesBody) -> dict[str, Any]:
    effort = None if body.reasoning is None else body.reasoning.effort
    return {} if effort is None else {"reasoning_effort": effort}


async def _prompt(
    engine: AsyncEngine, rendering: Rendering, turn: _Turn, before: StoredResponse | None
) -> tuple[str, Int32]:
    """Return the chat's text and its tokens int32 [n]. Where the chat just continues, earlier tokens are reused
    unchanged."""
    instructions = turn.body.instructions
    leading = [] if instructions is None else [{"role": "system", "content": instructions}]
    tokenizer = engine.tokenizer
    whole = rendering.text(tokenizer, [*leading, *turn.messages])
    if before is not None:
        known = replace(rendering, add_generation_prompt=False).text(tokenizer, [*leading, *before.messages])
        tokens = np.array(before.tokens, np.int32)
        rest = continuation(tokenizer, tokens, 0, known, whole)
        if rest is not None:
            return whole, np.concatenate([tokens, await engine.encode(rest, False)])
    return whole, await engine.encode(whole, False)


class _Answer:
    def __init__(self, generator: Generator, store: ResponseStore, job: Job, turn: _Turn):
        self._generator = generator
        self._store = store
        self._job = job
        self._turn = turn
        self._created = int(time.time())
        self._output = Output()
        self._items = OutputItems(job.id)

    async def whole(self) -> dict[str, Any]:
        async with aclosing(self._generator.deltas(self._job)) as deltas:
            async for delta in deltas:
                self._output.add(delta)
                self._items.add(delta.events)
        self._items.finish(self._status(self._output.end) == "completed")
        return await self._completed()

    async def stream(self) -> AsyncGenerator[dict[str, Any]]:
        items, has_begun = self._items, False
        async with aclosing(self._generator.deltas(self._job)) as deltas:
            async for delta in deltas:
                if not has_begun:
                    has_begun = True
                    yield items.event("created", response=self._response("in_progress"))
                    yield items.event("in_progress", response=self._response("in_progress"))
                self._output.add(delta)
                for event in items.add(delta.events):
                    yield event
        status = self._status(self._output.end)
        for event in items.finish(status == "completed"):
            yield event
        yield items.event(status, response=await self._completed())

    @staticmethod
    def _status(ended: Ended) -> str:
        return {"length": "incomplete", "stop": "completed"}.get(ended.kind, "cancelled")

    async def _completed(self) -> dict[str, Any]:
        """Return the final response, stored before the client sees it, so that it can be continued at once."""
        output, turn = self._output, self._turn
        response = self._response(self._status(output.end))
        if turn.body.store is not False and output.end.is_complete:
            messages = [*turn.messages, output.answer.as_message()]
            tokens = [*self._job.prompts[0].tolist(), *output.tokens]
            await self._store.put(StoredResponse(response, turn.items, messages, tokens), turn.client.name)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        body, params = self._turn.body, self._job.params
        form = None if body.text is None else body.text.format
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._turn.model,
            "output": [] if status == "in_progress" else self._items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {"format": form or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "metadata": body.metadata or {},
            "background": False,
        }

    def _usage(self) -> dict[str, Any]:
        counted = usage([self._output.end], self._job, self._output.reasoning_tokens)
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": counted["reasoning_tokens"]},
            "total_tokens": counted["total_tokens"],
        }
