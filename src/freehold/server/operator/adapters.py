"""Loads and unloads adapters at run time. Routes and fields are those of vLLM and SGLang."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from freehold.contract.errors import InvalidParameter
from freehold.ipc.async_engine import AsyncEngine
from freehold.server.router import router
from freehold.server.served_models import ServedModels


class LoadAdapterBody(BaseModel):
    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1)


class UnloadAdapterBody(BaseModel):
    lora_name: str


def adapter_routes(engine: AsyncEngine, models: ServedModels) -> APIRouter:
    routes = router()

    def loaded(message: str) -> dict[str, Any]:
        return {"success": True, "message": message, "loaded_adapters": dict(models.adapters())}

    @routes.post("/v1/load_lora_adapter")
    @routes.post("/load_lora_adapter")
    async def load(body: LoadAdapterBody) -> dict[str, Any]:
        """Load an adapter from a folder on the server's machine. Clients select it by name, as their model."""
        if body.lora_name in models.names:
            raise InvalidParameter("lora_name", f"'{body.lora_name}' is the model's name")
        await engine.load_adapter(body.lora_name, body.lora_path)
        return loaded(f"The adapter '{body.lora_name}' is loaded.")

    @routes.post("/v1/unload_lora_adapter")
    @routes.post("/unload_lora_adapter")
    async def unload(body: UnloadAdapterBody) -> dict[str, Any]:
        """Unload an adapter. Requests that began with it finish with it."""
        await engine.unload_adapter(body.lora_name)
        return loaded(f"The adapter '{body.lora_name}' is unloaded.")

    return routes
