"""/v1/sessions/{name}/save and /restore: copy to the deepest tier, and back to the device."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request

from freehold.contract.arrays import Int32
from freehold.contract.sampling_params import SamplingParams
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Options
from freehold.server.access.clients import client_of
from freehold.server.openai.schema import SaveBody
from freehold.server.requests.response import unless_disconnected
from freehold.server.router import router
from freehold.server.sessions.table import Session, SessionTable


def saving_routes(engine: AsyncEngine, table: SessionTable) -> APIRouter:
    routes = router()

    @routes.post("/v1/sessions/{name}/save")
    async def save(request: Request, name: str, body: SaveBody | None = None) -> dict[str, Any]:
        """Copy the session's whole pages to the deepest tier, regardless of the write policy."""
        found = table.get(name, client_of(request))
        tokens = (await table.conversation(found)).tokens.tobytes()
        timeout = (body or SaveBody()).timeout
        saving = engine.call("save", {"tokens": tokens, "timeout": timeout, **found.scope})
        with table.in_use(found):
            saved = await unless_disconnected(request, saving)
        return {"id": name, "object": "session.saved", **saved}

    @routes.post("/v1/sessions/{name}/restore")
    async def restore(request: Request, name: str) -> dict[str, Any]:
        """Load the session's KV to the device before its next turn, computing the part that no tier has."""
        found = table.get(name, client_of(request))
        tokens = (await table.conversation(found)).tokens
        by_tier = dict.fromkeys(("device", "host", "storage"), 0)
        if len(tokens):
            with table.in_use(found):
                by_tier |= await _compute(engine, tokens, found)
        cached = sum(by_tier.values())
        return {
            "id": name, "object": "session.restored", "tokens": len(tokens), "cached_tokens": by_tier,
            "computed_tokens": len(tokens) - cached,
        }  # fmt: skip

    return routes


async def _compute(engine: AsyncEngine, tokens: Int32, session: Session) -> dict[str, int]:
    """Compute `tokens` [n] or load them. Return how many came from which tier."""
    params, settings = SamplingParams(max_tokens=1, temperature=0), session.settings
    options = Options(namespace=settings.namespace, client=settings.owner, adapter=session.adapter)
    by_tier: dict[str, int] = {}
    async for delta in engine.stream([tokens], params, f"restore-{uuid.uuid4().hex}", options):
        if delta.ended is not None:
            by_tier = delta.ended.cached_by_tier
    return by_tier
