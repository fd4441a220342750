"""Converts an answer to an HTTP response, whole or as server-sent events, while the client stays connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from freehold.contract.errors import Aborted, FreeholdError
from freehold.server.errors import anthropic_error, as_api_error, error_body, responses_error
from freehold.server.sessions.table import Turn

Chunks = AsyncGenerator[dict[str, Any]]


class Answer(Protocol):
    """A route's answer. Both methods start the work; closing the stream or cancelling ends it."""

    async def whole(self) -> Any: ...

    def stream(self) -> Chunks: ...


@dataclass(frozen=True)
class EventFormat:
    """An API's event format."""

    encode: Callable[[dict[str, Any]], bytes]
    error: Callable[[FreeholdError], dict[str, Any]]
    closing: bytes = b""


# Line ends for many clients (httpx, Python's splitlines), although not in the SSE standard.
_LINE_ENDS = {character.encode(): f"\\u{ord(character):04x}".encode() for character in "\x85\u2028\u2029"}


def _data(event: dict[str, Any]) -> bytes:
    text = orjson.dumps(event)
    for character, escaped in _LINE_ENDS.items():
        text = text.replace(character, escaped)
    return b"data: " + text + b"\n\n"


def _named(event: dict[str, Any]) -> bytes:
    return b"event: " + event["type"].encode() + b"\n" + _data(event)


OPENAI_EVENTS = EventFormat(_data, error_body, b"data: [DONE]\n\n")
ANTHROPIC_EVENTS = EventFormat(_named, anthropic_error)
RESPONSES_EVENTS = EventFormat(_named, responses_error)


async def respond(
    request: Request,
    answer: Answer,
    streams: bool | None,
    turn: Turn | None = None,
    events: EventFormat = OPENAI_EVENTS,
) -> Any:
    """Return the response to `request`. Its session `turn`, if any, is closed when it ends for any reason. An error
    before the first event is an ordinary HTTP error."""
    async with AsyncExitStack() as ending:
        if turn is not None:
            ending.callback(turn.close)
        if not streams:
            return await unless_disconnected(request, answer.whole())
        chunks = answer.stream()
        ending.push_async_callback(chunks.aclose)
        first = await anext(chunks)
        return _EventStream(_encoded(first, chunks, events), ending.pop_all())


class _EventStream(StreamingResponse):
    """Server-sent events. `ending` runs when they have been sent or sending fails."""

    def __init__(self, body: AsyncGenerator[bytes], ending: AsyncExitStack):
        super().__init__(body, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._ending:
            await super().__call__(scope, receive, send)


async def _encoded(first: dict[str, Any], rest: Chunks, events: EventFormat) -> AsyncGenerator[bytes]:
    yield events.encode(first)
    try:
        async for chunk in rest:
            yield events.encode(chunk)
    except Exception as error:
        yield events.encode(events.error(as_api_error(error)))
    yield events.closing


async def unless_disconnected(request: Request, work: Any) -> Any:
    """Await `work`, but cancel it and raise Aborted if the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Aborted("the client has disconnected")
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
