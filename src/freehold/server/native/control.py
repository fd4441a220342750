"""The native routes around /generate: sessions, aborts, the cache, health and information."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from freehold.contract.errors import BadRequest, Forbidden, NoSuchSession, SessionBusy
from freehold.contract.sampling_params import SamplingParams
from freehold.ipc.async_engine import AsyncEngine
from freehold.server.access.clients import Client, client_of
from freehold.server.native.schema import AbortBody, CloseSessionBody, OpenSessionBody
from freehold.server.requests.job import Generator
from freehold.server.router import router
from freehold.server.sessions.settings import SessionSettings
from freehold.server.sessions.table import SessionTable

FLUSH_POLL_S = 0.05


def native_control_routes(engine: AsyncEngine, generator: Generator, sessions: SessionTable) -> APIRouter:
    routes = router()
    flushing = asyncio.Lock()

    @routes.post("/open_session")
    async def open_session(request: Request, body: OpenSessionBody) -> str:
        client = client_of(request)
        settings = SessionSettings(
            body.timeout, namespace=client.namespace(None), branching=not body.streaming, owner=client.name
        )
        try:
            return (await sessions.open(body.session_id, settings)).id
        except SessionBusy as error:
            raise BadRequest(str(error), "session_id") from error

    @routes.post("/close_session")
    async def close_session(request: Request, body: CloseSessionBody) -> Response:
        """Close a session after its running turn. Unknown names are ignored: they count as closed."""
        with contextlib.suppress(NoSuchSession):
            sessions.close(sessions.get(body.session_id, client_of(request)))
            await sessions.memory.settle()
        return Response(status_code=200)

    @routes.post("/abort_request")
    async def abort_request(request: Request, body: AbortBody) -> Response:
        _abort(body, client_of(request), engine, generator)
        return Response(status_code=200)

    @routes.get("/flush_cache", include_in_schema=False)
    @routes.post("/flush_cache")
    async def flush_cache(timeout: float = 0.0) -> Response:
        """Empty the prefix cache and drop parked session tails, once nothing runs."""
        if flushing.locked():
            raise BadRequest("another flush is waiting")
        async with flushing:
            end = time.monotonic() + timeout
            while not await engine.call("idle"):
                if time.monotonic() >= end:
                    raise BadRequest("requests are running or waiting: the cache was not flushed")
                await asyncio.sleep(FLUSH_POLL_S)
            pages = await engine.call("flush")
        return PlainTextResponse(f"Cache flushed: {pages} pages given back.\n", headers={"X-Flushed-Pages": str(pages)})

    @routes.get("/health_generate")
    async def health_generate() -> Response:
        """Generate one token; during a pause, only check health."""
        if not engine.is_healthy:
            return Response(status_code=503)
        if not await engine.call("paused"):
            params = SamplingParams(max_tokens=1, temperature=0)
            async for _ in engine.stream([np.zeros(1, np.int32)], params, f"health-{uuid.uuid4().hex}"):
                pass
        return Response(status_code=200)

    return routes


def _abort(body: AbortBody, client: Client, engine: AsyncEngine, generator: Generator) -> None:
    """Abort requests. Administrators may abort all, or those whose id starts with `rid`; other clients only their own
    request with this id. Raises Forbidden."""
    if body.abort_all and not client.is_admin:
        raise Forbidden("abort_all needs an admin API key (--admin-api-key)")
    rid = body.rid or ""
    if client.is_admin and (body.abort_all or rid):
        engine.abort_by_prefix("" if body.abort_all else rid)
    else:
        generator.abort(rid, client)
