"""/v1/cache/events: blocks stored in and removed from the cache, as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from freehold.contract.errors import BadRequest, InvalidParameter, Unavailable
from freehold.events.config import EventsConfig
from freehold.events.follower import Follower
from freehold.events.wire import BlockRemoved, BlockStored, EventBatch
from freehold.ipc.async_engine import AsyncEngine
from freehold.server.router import router

FOLLOWERS_MAX = 16
IDLE_MS = 5000  # then a comment is sent, to detect lost connections


def event_routes(engine: AsyncEngine) -> APIRouter:
    routes = router()
    text = engine.config.kv_events_config
    config = EventsConfig() if text is None else EventsConfig.parse(text)
    following: set[Follower] = set()

    @routes.get("/v1/cache/events")
    async def events(request: Request) -> StreamingResponse:
        """Stream each batch as an event, with its number as the id. A client that reconnects with Last-Event-ID first
        gets what it missed."""
        if not config.is_on:
            raise BadRequest(
                """events are not published: start with --kv-events-config '{"enable_kv_cache_events": true}'"""
            )
        if len(following) >= FOLLOWERS_MAX:
            raise Unavailable(f"{FOLLOWERS_MAX} clients already follow the events")
        last = request.headers.get("last-event-id")
        if last is not None and not (last.isascii() and last.isdecimal()):
            raise InvalidParameter("Last-Event-ID", f"must be the number of a batch, not '{last}'")
        try:
            follower = Follower(config, None if last is None else int(last) + 1)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        following.add(follower)

        async def stream() -> AsyncGenerator[bytes]:
            try:
                yield b": following\n\n"
                async for news in follower.batches(IDLE_MS):
                    yield b": idle\n\n" if news is None else _event(*news)
            finally:
                following.discard(follower)
                follower.close()

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    return routes


def _event(number: int, batch: EventBatch) -> bytes:
    """Encode a batch. Hashes are in hexadecimal."""
    data = {"ts": batch.ts, "events": [_readable(event) for event in batch.events]}
    return b"id: %d\nevent: batch\ndata: %s\n\n" % (number, json.dumps(data).encode())


def _readable(event: object) -> dict[str, object]:
    found: dict[str, object] = {"type": type(event).__name__}
    match event:
        case BlockStored():
            parent = event.parent_block_hash
            found |= {
                "block_hashes": [f"{name:016x}" for name in event.block_hashes],
                "parent_block_hash": None if parent is None else f"{parent:016x}",
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "medium": event.medium,
            }
        case BlockRemoved():
            found |= {"block_hashes": [f"{name:016x}" for name in event.block_hashes], "medium": event.medium}
        case _:
            pass
    return found
