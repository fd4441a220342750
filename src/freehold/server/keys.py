"""API keys: one for everybody, one for operators."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from fastapi import Request

from freehold.server.errors import ApiError

OPEN_PATHS = ("/health", "/version")
ADMIN_PATHS = (
    "/flush_cache", "/debug/", "/pause_generation", "/continue_generation", "/update_weights_from_disk", "/v1/cache",
)  # fmt: skip
NOT_ADMIN_PATHS = ("/v1/cache/lookup",)


@dataclass(frozen=True)
class Keys:
    """None means that no key is asked for. The admin key opens everything; without one, the other does."""

    api_key: str | None = None
    admin_api_key: str | None = None

    async def check(self, request: Request) -> None:
        """A dependency of every route. Raises ApiError 401 or 403."""
        path = request.url.path
        if path in OPEN_PATHS:
            return
        is_admin = path.startswith(ADMIN_PATHS) and not path.startswith(NOT_ADMIN_PATHS)
        given = _given(request)
        if self.admin_api_key is not None and (is_admin or _equal(given, self.admin_api_key)):
            if not _equal(given, self.admin_api_key):
                raise ApiError(403, "this route needs the admin API key")
        elif self.api_key is not None and not _equal(given, self.api_key):
            raise ApiError(401, "wrong or missing API key: send it as 'Authorization: Bearer KEY'")


def _given(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())
