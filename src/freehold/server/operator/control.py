"""Pause, resume and weight updates, as training loops need of a rollout server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from freehold.ipc.async_engine import AsyncEngine
from freehold.server.openai.schema import PauseBody, WeightsBody
from freehold.server.router import router


def control_routes(engine: AsyncEngine) -> APIRouter:
    routes = router()

    @routes.post("/pause_generation")
    async def pause(body: PauseBody | None = None) -> dict[str, Any]:
        """Finish the steps in flight and compute no more. New requests are accepted and wait."""
        await engine.call("pause", (body or PauseBody()).mode)
        return {"message": "Generation paused successfully.", "status": "ok"}

    @routes.post("/continue_generation")
    async def resume() -> dict[str, Any]:
        await engine.call("resume")
        return {"message": "Generation continued successfully.", "status": "ok"}

    @routes.post("/update_weights_from_disk")
    async def update_weights(body: WeightsBody) -> dict[str, Any]:
        """Load the weights of another model of the same shape. Results cached with the old ones are never reused."""
        await engine.call("update_weights", body.model_path)
        return {"success": True, "message": "Weights updated."}

    return routes
