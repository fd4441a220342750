"""API keys: one for everybody, one for operators."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from fastapi import Request

from freehold.errors import Forbidden, Unauthorized
from freehold.server.access.clients import Client

OPEN_PATHS = ("/health", "/version")
ADMIN_PATHS = (
    "/flush_cache", "/debug/", "/pause_generation", "/continue_generation", "/update_weights_from_disk", "/v1/cache",
)  # fmt: skip
NOT_ADMIN_PATHS = ("/v1/cache/lookup",)


@dataclass(frozen=True)
class Keys:
    """Empty means that no key is asked for. The admin key opens everything; without one, the others do, but
    for each other's sessions."""

    api_keys: tuple[str, ...] = ()
    admin_api_key: str | None = None

    async def check(self, request: Request) -> None:
        """A dependency of every route: notes who asks. Raises Unauthorized or Forbidden."""
        path = request.url.path
        request.state.client = Client()
        if path in OPEN_PATHS:
            return
        given = _given(request)
        if self.admin_api_key is not None and _equal(given, self.admin_api_key):
            request.state.client = Client(_name(given), is_admin=True)
            return
        is_admin_path = path.startswith(ADMIN_PATHS) and not path.startswith(NOT_ADMIN_PATHS)
        if self.admin_api_key is not None and is_admin_path:
            raise Forbidden("this route needs the admin API key")
        if self.api_keys and not any(_equal(given, key) for key in self.api_keys):
            raise Unauthorized("wrong or missing API key: send it as 'Authorization: Bearer KEY'")
        if self.api_keys:
            request.state.client = Client(_name(given))


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _given(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())
