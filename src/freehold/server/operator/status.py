"""Health and information about this server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from freehold import __version__
from freehold.ipc.async_engine import AsyncEngine
from freehold.options import options_of
from freehold.server.config import ServerConfig
from freehold.server.router import router
from freehold.server.served_models import ServedModels


def status_routes(
    engine: AsyncEngine, models: ServedModels, server: ServerConfig, sources: Mapping[str, str]
) -> APIRouter:
    routes = router()
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "freehold",
            "root": models.adapters().get(name, engine.info.model_path),
            "parent": models.first if name in models.adapters() else None,
            "max_model_len": engine.info.max_model_len,
        }

    @routes.get("/health")
    async def health() -> JSONResponse:
        """Return 200 while the engine serves; 503 while it loads or drains, and after a failed audit. `degraded` names
        unavailable parts and why."""
        trouble = engine.stats.storage_trouble
        degraded = {} if trouble is None else {"storage": trouble}
        return JSONResponse({"degraded": degraded}, 200 if engine.is_healthy else 503)

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @routes.get("/v1/models")
    async def all_models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in models.all]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return card(models.known(name))

    @routes.get("/get_model_info")
    @routes.get("/model_info")
    async def model_info() -> dict[str, Any]:
        path = engine.info.model_path
        return {
            "model_path": engine.setup.weights or path,
            "tokenizer_path": path,
            "served_model_name": models.first,
            "is_generation": True,
            "weight_version": "default",
            "model_type": engine.info.architecture,
            "architectures": [engine.info.architecture],
        }

    @routes.get("/get_server_info")
    @routes.get("/server_info")
    async def server_info() -> dict[str, Any]:
        options = {**_options(engine.config, sources), **_options(server, sources)}
        return {**_server_info(engine, models.first), "options": options}

    return routes


def _server_info(engine: AsyncEngine, model_name: str) -> dict[str, Any]:
    config, info = engine.config, engine.info
    return {
        "version": __version__,
        "model_path": engine.setup.weights or info.model_path,
        "paused": engine.setup.paused,
        "served_model_name": model_name,
        "page_size": config.page_size,
        "disable_radix_cache": config.disable_radix_cache,
        "disable_overlap_schedule": config.disable_overlap_schedule,
        "schedule_policy": config.schedule_policy,
        "context_length": info.max_model_len,
        "max_running_requests": config.max_running_requests,
        "max_total_num_tokens": info.capacity_tokens,
        "max_req_input_len": info.max_model_len - 1,
        "chunked_prefill_size": config.chunked_prefill_size,
        "cpu_isa": info.cpu_isa,
        "quantized": info.quantized,
        "internal_states": [{"pages": engine.stats.pages, "running": engine.stats.running}],
    }


def _options(record: Any, sources: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return each option's value and source: flag, environment, file, argument or default."""
    shown: dict[str, dict[str, Any]] = {}
    for one in options_of(type(record)):
        value = getattr(record, one.name)
        changed = "default" if value == one.default else "argument"
        hidden = "***" if one.is_secret and value else value
        shown[one.name] = {"value": hidden, "source": sources.get(one.name, changed)}
    return shown
