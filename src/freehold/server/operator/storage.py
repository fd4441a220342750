"""/hicache/storage-backend: attach, detach and clear the storage behind the host while the server runs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter

from freehold.contract.errors import BadRequest, TimedOut
from freehold.ipc.async_engine import AsyncEngine
from freehold.server.openai.schema import StorageBody
from freehold.server.router import router

PATH = "/hicache/storage-backend"
POLL_S = 0.05
LIMIT_S = 60.0


def storage_routes(engine: AsyncEngine) -> APIRouter:
    routes = router()

    async def until_done(procedure: str, argument: Any = None, field: str | None = None) -> dict[str, Any]:
        """Run a procedure and wait for it. Raises BadRequest, naming `field`, if it fails, TimedOut after LIMIT_S; it
        then continues."""
        await engine.call(procedure, argument)
        end = time.monotonic() + LIMIT_S
        while (status := await engine.call("storage"))["state"] not in ("attached", "detached"):
            if time.monotonic() > end:
                raise TimedOut(f"the storage backend is still {status['state']} after {LIMIT_S:g} s")
            await asyncio.sleep(POLL_S)
        if status["error"] is not None:
            raise BadRequest(status["error"], field)
        return status

    @routes.get(PATH)
    async def status() -> dict[str, Any]:
        return await engine.call("storage")

    @routes.put(PATH)
    async def attach(body: StorageBody) -> dict[str, Any]:
        """Open a store. Host pages are copied to it, and new requests look there."""
        # The kind and capacity are already validated, so that only the location can fail.
        return await until_done("attach_storage", body.backend(), "hicache_storage_location")

    @routes.delete(PATH)
    async def detach() -> dict[str, Any]:
        """Close the store after its current work. It keeps its contents."""
        return await until_done("detach_storage")

    @routes.post(f"{PATH}/clear")
    async def clear() -> dict[str, Any]:
        """Delete all stored pages."""
        return await until_done("clear_storage")

    return routes
