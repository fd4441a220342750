"""/v1/sessions: open, list, get, fork, rewind, close."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request

from freehold.ipc.async_engine import AsyncEngine
from freehold.server.access.clients import client_of
from freehold.server.openai.schema import ForkBody, RewindBody, SessionBody
from freehold.server.router import router
from freehold.server.sessions.settings import SessionSettings
from freehold.server.sessions.table import Session, SessionTable

LISTED_MAX = 1000  # sessions in an answer
ABORT_TIMEOUT_S = 10.0  # for running turns to end

Limit = Annotated[int, Query(ge=1, le=LISTED_MAX)]


def session_routes(engine: AsyncEngine, table: SessionTable) -> APIRouter:
    routes = router()

    def card(session: Session) -> dict[str, Any]:
        return _described(session, table.last_used(session))

    @routes.post("/v1/sessions")
    async def open_session(request: Request, body: SessionBody | None = None) -> dict[str, Any]:
        body = body or SessionBody()
        client = client_of(request)
        namespace = client.namespace(body.cache_salt)
        settings = SessionSettings(body.timeout, body.capacity, namespace, owner=client.name)
        return card(await table.open(body.session_id, settings))

    @routes.get("/v1/sessions")
    async def sessions(request: Request, limit: Limit = LISTED_MAX, after: str | None = None) -> dict[str, Any]:
        """List sessions in opening order, those after the session `after`."""
        client = client_of(request)
        found = table.of(client)
        start = 0 if after is None else found.index(table.get(after, client)) + 1
        data = [card(session) for session in found[start : start + limit]]
        return {"object": "list", "data": data, "has_more": start + limit < len(found)}

    @routes.get("/v1/sessions/{name}")
    async def session(request: Request, name: str, token_ids: bool = False) -> dict[str, Any]:
        """Describe a session with its cached whole pages and tail, and its tokens if requested."""
        found = table.get(name, client_of(request))
        tokens = (await table.conversation(found)).tokens
        # The last token of a prompt is always computed.
        argument = {"tokens": np.append(tokens, np.int32(0)).tobytes(), **found.scope, "session": found.key}
        shown = {**card(found), "cached": await engine.call("lookup", argument)}
        return {**shown, "token_ids": tokens.tolist()} if token_ids else shown

    @routes.post("/v1/sessions/{name}/fork")
    async def fork(request: Request, name: str, body: ForkBody | None = None) -> dict[str, Any]:
        return card(await table.fork(table.get(name, client_of(request)), (body or ForkBody()).session_id))

    @routes.post("/v1/sessions/{name}/rewind")
    async def rewind(request: Request, name: str, body: RewindBody) -> dict[str, Any]:
        found = table.get(name, client_of(request))
        await table.rewind(found, body.to)
        return card(found)

    @routes.delete("/v1/sessions/{name}")
    async def close(request: Request, name: str, abort: bool = False) -> dict[str, Any]:
        """Close a session after its running turn, or with `abort` immediately."""
        found = table.get(name, client_of(request))
        running = list(found.running)
        table.close(found, abort)
        if abort:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_TIMEOUT_S):
                    for turn in running:
                        await turn.is_over.wait()
        await table.memory.settle()
        return {"id": name, "object": "session.deleted", "deleted": not found.running}

    return routes


def _described(session: Session, last_used: float) -> dict[str, Any]:
    settings = session.settings
    return {
        "id": session.id,
        "object": "session",
        "tokens": session.tokens,
        "turns": session.turns,
        "active": bool(session.running),
        "waiting": len(session.line),
        "closing": session.closing,
        "last_used": last_used,
        "timeout": settings.timeout,
        "capacity": settings.capacity,
    }
