"""The smallest OpenAI-compatible server for the workloads, around an engine without one.

Imported by this folder's programs, which run in other engines' Python. Imports nothing of Freehold.
"""

# pyright: reportMissingImports=false

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route


class Engine(Protocol):
    def encode(self, prompt: str | list[int]) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...

    def submit(self, ids: list[int], count: int, deliver: Callable[[list[int] | None], object]) -> None:
        """Generate `count` tokens. Any thread may call `deliver` with new tokens, and at last with None."""
        ...


def serve(engine: Engine, name: str, port: int) -> None:
    async def health(request: Any) -> Any:
        return JSONResponse({})

    async def models(request: Any) -> Any:
        return JSONResponse({"data": [{"id": name}]})

    async def completions(request: Any) -> Any:
        body = await request.json()
        ids, count = engine.encode(body["prompt"]), body["max_tokens"]
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue()
        engine.submit(ids, count, lambda tokens: loop.call_soon_threadsafe(arrived.put_nowait, tokens))

        async def events() -> AsyncIterator[str]:
            output, shown = [], ""
            while (tokens := await arrived.get()) is not None:
                output += tokens
                text = engine.decode(output)
                yield f"data: {json.dumps({'choices': [{'index': 0, 'text': text[len(shown) :]}]})}\n\n"
                shown = text
            usage = {"prompt_tokens": len(ids), "completion_tokens": len(output)}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    routes = [
        Route("/health", health),
        Route("/v1/models", models),
        Route("/v1/completions", completions, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), port=port, log_level="warning")
