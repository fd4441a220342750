"""Errors as the OpenAI API shapes them."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from freehold.errors import (
    ChatTemplateError,
    EngineUnavailable,
    InvalidParameter,
    NoSuchSession,
    QueueFull,
    SessionBusy,
    TurnRefused,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer other than 200. `param` names the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


EXPECTED_ERRORS = (
    ApiError, InvalidParameter, ChatTemplateError, QueueFull, EngineUnavailable, NoSuchSession, SessionBusy,
    TurnRefused,
)  # fmt: skip


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"message": message, "type": kind, "param": param, "code": status}
    # OpenAI's clients look inside `error`, others look at the top.
    return {"error": error, "object": "error", **error}


def as_api_error(error: Exception) -> ApiError:
    """What went wrong, in HTTP's terms."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidParameter):
        return ApiError(400, str(error), error.field)
    if isinstance(error, ChatTemplateError):
        return ApiError(400, str(error), "messages")
    if isinstance(error, NoSuchSession):
        return ApiError(404, str(error), "session_id")
    if isinstance(error, SessionBusy):
        return ApiError(409, str(error), "session_id")
    if isinstance(error, TurnRefused):
        return ApiError(400, str(error), "session_id")
    if isinstance(error, (QueueFull, EngineUnavailable)):
        return ApiError(503, str(error))
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail))
    return ApiError(500, f"internal error: {type(error).__name__}: {error}")


def _validation_error(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    # pydantic names the branches of a union in the location; the field is the first part.
    field = where[0] if where else None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', '')}")
    got = repr(first.get("input"))
    message = f"{'.'.join(where) or 'body'}: {first['msg']}, got {got[:100]}"
    return ApiError(400, message, field)


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


async def respond_with_error(request: Request, error: Exception) -> Response:
    """The handler for every exception."""
    failure = as_api_error(error)
    headers = {"Retry-After": "1"} if failure.status == 503 else None
    if request.url.path.startswith("/v1/messages"):
        body = anthropic_error(failure.status, failure.message)
    else:
        body = error_body(failure.status, failure.message, failure.param)
    return Response(orjson.dumps(body), failure.status, headers, "application/json")
