"""/v1/cache: cached prefixes, lookups, prefetches and operators' pins."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request

from freehold.contract.arrays import Int32
from freehold.contract.errors import InvalidParameter, NotFound
from freehold.contract.sampling_params import SamplingParams
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Options
from freehold.scheduler.request import check_token_ids
from freehold.server.access.clients import Client, client_of
from freehold.server.openai.schema import LookupBody, PinBody, for_template
from freehold.server.requests.prompt import Rendering
from freehold.server.router import router


def cache_routes(engine: AsyncEngine) -> APIRouter:
    routes = router()

    @routes.get("/v1/cache")
    async def cache() -> dict[str, Any]:
        """Report pages by owner, the most hit prefixes, and page ages at hits and evictions."""
        return await engine.call("cache")

    @routes.post("/v1/cache/lookup")
    async def lookup(request: Request, body: LookupBody) -> dict[str, Any]:
        """Report how many tokens would hit now, and why the rest would miss."""
        found = await explain_miss(engine, body, client_of(request))
        host = {"host": found.pop("host_tokens")} if "host_tokens" in found else {}
        return {**found, "cached_tokens": {"device": found["cached_tokens"], **host}}

    @routes.post("/v1/cache/prefetch")
    async def prefetch(request: Request, body: LookupBody) -> dict[str, Any]:
        """Prefetch a prompt's pages from storage to the host."""
        tokens = await _tokens(engine, body)
        return await engine.call("prefetch", {"tokens": tokens.tobytes(), **_scope(body, client_of(request))})

    @routes.get("/v1/cache/pins")
    async def pins() -> dict[str, Any]:
        return await engine.call("pins")

    @routes.post("/v1/cache/pins")
    async def pin(body: PinBody) -> dict[str, Any]:
        """Pin a prefix, computing it if necessary. The answer says how much fits the budget."""
        tokens = await _tokens(engine, body)
        params = SamplingParams(max_tokens=1, temperature=0)
        options = Options(namespace=body.cache_salt or "", adapter=body.lora_path or "")
        async for _ in engine.stream([tokens], params, f"pin-{uuid.uuid4().hex}", options):
            pass
        name = body.id or uuid.uuid4().hex
        scope = {"namespace": options.namespace, "adapter": options.adapter}
        return await engine.call("pin", {"id": name, "tokens": tokens.tobytes(), "ttl": body.ttl, **scope})

    @routes.delete("/v1/cache/pins/{name:path}")
    async def unpin(name: str) -> dict[str, Any]:
        if not await engine.call("unpin", name):
            raise NotFound(f"there is no pin '{name}'")
        return {"id": name, "object": "cache.pin.deleted", "deleted": True}

    return routes


async def explain_miss(engine: AsyncEngine, body: LookupBody, client: Client) -> dict[str, Any]:
    """Report how much of a prompt is cached now, and why no more."""
    tokens = await _tokens(engine, body)
    return await engine.call("miss", {"tokens": tokens.tobytes(), **_scope(body, client)})


def _scope(body: LookupBody, client: Client) -> dict[str, str]:
    """Return the cache scope in the arguments of the engine's procedures."""
    return {"namespace": client.namespace(body.cache_salt), "adapter": body.lora_path or ""}


async def _tokens(engine: AsyncEngine, body: LookupBody) -> Int32:
    given = [value for value in (body.prompt, body.messages, body.token_ids) if value is not None]
    if len(given) != 1:
        raise InvalidParameter("prompt", "give exactly one of prompt, messages and token_ids")
    ids = body.prompt if isinstance(body.prompt, list) else body.token_ids
    if ids is not None:
        tokens = check_token_ids(ids, engine.info.vocab_size)
    elif body.messages is not None:
        tokens = await Rendering().tokens(engine, for_template(body.messages))
    else:
        tokens = await engine.encode(str(body.prompt), True)
    if len(tokens) == 0:
        raise InvalidParameter("prompt", "must not be empty")
    return tokens
