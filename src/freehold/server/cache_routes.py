"""/v1/cache: what is cached, and what of a prompt would hit."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from freehold.llm import check_token_ids
from freehold.sampling_params import InvalidParameter
from freehold.server.async_engine import AsyncEngine
from freehold.server.chat import chat_prompt
from freehold.server.generation import encode
from freehold.server.schema import LookupBody


def cache_routes(engine: AsyncEngine) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/cache")
    async def cache() -> dict[str, Any]:
        """Pages by owner, the prefixes hit most, and how old pages are when hit and when evicted."""
        return await engine.ask("cache")

    @router.post("/v1/cache/lookup")
    async def lookup(body: LookupBody) -> dict[str, Any]:
        """How many tokens would hit now, and why the rest would not."""
        given = [value for value in (body.prompt, body.messages, body.token_ids) if value is not None]
        if len(given) != 1:
            raise InvalidParameter("prompt", "give exactly one of prompt, messages and token_ids")
        if body.token_ids is not None:
            tokens = check_token_ids(body.token_ids, engine.info.vocab_size)
        elif body.messages is not None:
            tokens = await chat_prompt(engine.tokenizer, body.messages, True, {})
        else:
            tokens = await encode(engine.tokenizer, body.prompt or "", True)
        if len(tokens) == 0:
            raise InvalidParameter("prompt", "must not be empty")
        found = await engine.ask("miss", {"tokens": tokens.tolist(), "namespace": body.cache_salt or ""})
        return {**found, "cached_tokens": {"device": found["cached_tokens"]}}

    return router
