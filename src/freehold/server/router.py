"""Routes whose bodies are strict JSON."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Parse the body. Unlike Python's parser, orjson rejects text that UTF-8 can't hold (lone surrogates), NaN and
        unlimited nesting. Raises json.JSONDecodeError."""
        return orjson.loads(await self.body())


class _JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


def router() -> APIRouter:
    """Return a router for one module's routes."""
    return APIRouter(route_class=_JsonRoute)
