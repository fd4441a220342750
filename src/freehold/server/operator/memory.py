"""Metrics, and who holds which page."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from freehold.ipc.async_engine import AsyncEngine
from freehold.server.openai.schema import LookupBody
from freehold.server.operator.cache import explain_miss
from freehold.server.operator.metrics import Metrics


def insight_routes(engine: AsyncEngine, metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    @router.get("/debug/memory")
    async def memory(page: int | None = None) -> dict[str, Any]:
        """Who holds what, recounted; one page explained."""
        if page is None:
            return await engine.call("memory")
        return {"page": page, "explanation": await engine.call("page", page)}

    @router.get("/debug/requests/{name}")
    async def request(name: str) -> dict[str, Any]:
        """What a request went through: hits, misses and why, retractions, seconds in each state."""
        return await engine.call("request", name)

    @router.post("/debug/miss")
    async def miss(body: LookupBody) -> dict[str, Any]:
        """How much of a prompt is cached now, and why no more."""
        return await explain_miss(engine, body)

    return router
