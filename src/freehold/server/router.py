"""Routes whose bodies are strict JSON."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Unlike Python's own parser orjson refuses what no UTF-8 text can hold (half of a surrogate pair), numbers
        that are none (NaN), and nesting without end. Raises json.JSONDecodeError."""
        return orjson.loads(await self.body())


class _JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_JsonRequest(request.scope, request.receive))

        return handle


def router() -> APIRouter:
    """For the routes of one module."""
    return APIRouter(route_class=_JsonRoute)
