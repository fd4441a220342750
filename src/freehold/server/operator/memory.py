"""Metrics and page ownership."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from freehold.ipc.async_engine import AsyncEngine
from freehold.server.access.clients import client_of
from freehold.server.openai.schema import LookupBody
from freehold.server.operator.cache import explain_miss
from freehold.server.operator.metrics import Metrics
from freehold.server.router import router


def insight_routes(engine: AsyncEngine, metrics: Metrics) -> APIRouter:
    routes = router()

    @routes.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    @routes.get("/debug/memory")
    async def memory(page: int | None = None, group: int = 0) -> dict[str, Any]:
        """Recount page ownership, or explain one page of a cache group."""
        if page is None:
            return await engine.call("memory")
        return {"page": page, "explanation": await engine.call("page", {"page": page, "group": group})}

    @routes.get("/debug/requests/{name}")
    async def request(name: str) -> dict[str, Any]:
        """Report a request's hits, misses and their reasons, retractions, and seconds in each state."""
        return await engine.call("request", name)

    @routes.post("/debug/miss")
    async def miss(request: Request, body: LookupBody) -> dict[str, Any]:
        """Report how much of a prompt is cached now, and why no more."""
        return await explain_miss(engine, body, client_of(request))

    return routes
