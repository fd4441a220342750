"""Checks before a request's body is read: key, permission and body size."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freehold.contract.errors import BodyTooLarge, FreeholdError
from freehold.server.access.keys import ApiKey, Keys
from freehold.server.access.log import Record, request_id
from freehold.server.access.rights import Right, right_of
from freehold.server.access.usage import UsageTable
from freehold.server.errors import error_response


@dataclass(frozen=True)
class GateLimits:
    """`body()` returns a size in bytes. A body must be complete `body_timeout` seconds after its headers."""

    body: Callable[[], int]
    body_timeout: float


class Gate:
    """ASGI middleware. `observers` get the record of each ended request."""

    def __init__(
        self, app: ASGIApp, keys: Keys, limits: GateLimits, observers: Sequence[Callable[[Record], None]] = ()
    ):
        self._app = app
        self._keys = keys
        self._limits = limits
        self._observers = observers
        self._usage = UsageTable()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        key = self._keys.find(headers)
        name = key.client.name if key else ""
        record = Record(request_id(headers.get("x-request-id")), name, _route(scope), headers.get("traceparent"))
        try:
            await self._pass(scope, receive, _noting(record, send), headers, key, record)
        finally:
            for observe in self._observers:
                observe(record)

    async def _pass(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, key: ApiKey | None, record: Record
    ) -> None:
        right = right_of(_route(scope))
        usage = None if key is None or right is Right.OPEN else self._usage.of(key.client.name, key.quota)
        try:
            client = self._keys.check(key, right)
            body = _Body(receive, self._limits.body(), self._limits.body_timeout)
            body.expect(headers.get("content-length"))
            if usage is not None:
                usage.begin()
        except FreeholdError as error:
            # Keep the connection open: a client still sending its body could not read the answer otherwise.
            return await error_response(error, _route(scope), {})(scope, receive, send)
        scope.setdefault("state", {})["client"] = replace(client, address=_address(scope), usage=usage, record=record)
        try:
            await self._app(scope, body.receive, send)
        finally:
            if usage is not None:
                usage.end()


def _route(scope: Scope) -> str:
    """Return the path without the proxy's prefix (`--root-path`)."""
    prefix = scope.get("root_path", "")
    return scope["path"].removeprefix(prefix) if scope["path"].startswith(f"{prefix}/") else scope["path"]


def _address(scope: Scope) -> str:
    """Return the peer's address; empty for a Unix socket."""
    return scope["client"][0] if scope.get("client") else ""


def _noting(record: Record, send: Send) -> Send:
    """Wrap `send` to add the request id to the headers and the status to the record."""

    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
        await send(message)

    return noting


class _Body:
    """Limits a request's body. Raises HTTPException, since only that passes through the framework."""

    def __init__(self, receive: Receive, limit: int, timeout: float):
        self._receive = receive
        self._limit = limit
        self._end = time.monotonic() + timeout
        self._received = 0
        self._is_complete = False

    def expect(self, length: str | None) -> None:
        """Raise BodyTooLarge if the declared length is over the limit."""
        if length is not None and length.isdecimal() and int(length) > self._limit:
            raise BodyTooLarge(self._message())

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), max(self._end - time.monotonic(), 0.0))
        except TimeoutError:
            raise HTTPException(408, "the body did not arrive in time", {"Connection": "close"}) from None
        self._received += len(message.get("body", b""))
        if self._received > self._limit:
            raise HTTPException(413, self._message())
        self._is_complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    def _message(self) -> str:
        return f"the body is larger than {self._limit} bytes (--max-body-bytes)"
