"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from freehold.contract.errors import InvalidParameter
from freehold.ipc.async_engine import AsyncEngine
from freehold.server.openai.schema import DetokenizeBody, TokenizeBody, for_template
from freehold.server.requests.prompt import Rendering
from freehold.server.router import router


def tokenizing_routes(engine: AsyncEngine) -> APIRouter:
    routes = router()

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        tokenizer = engine.tokenizer
        if (body.prompt is None) == (body.messages is None):
            raise InvalidParameter("prompt", "give either prompt or messages")
        if body.messages is not None:
            tools, variables = body.tools or [], body.chat_template_kwargs or {}
            rendering = Rendering(body.add_generation_prompt is not False, variables=variables, tools=tools)
            tokens = await rendering.tokens(engine, for_template(body.messages))
        else:
            tokens = await engine.encode(body.prompt or "", body.add_special_tokens is not False, False)
        answer: dict[str, Any] = {"tokens": tokens.tolist(), "count": len(tokens)}
        answer["max_model_len"] = engine.info.max_model_len
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.piece(t, False).decode(errors="replace") for t in answer["tokens"]]
        return answer

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        for token in body.tokens:
            if token >= engine.info.vocab_size:
                raise InvalidParameter("tokens", f"token id {token} is outside the vocabulary")
        return {"prompt": engine.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    return routes
