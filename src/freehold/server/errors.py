"""Errors in the format of each API."""

from __future__ import annotations

import math
from typing import Any

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from freehold.contract.errors import BadRequest, FreeholdError, TooManyRequests, as_freehold_error

SHOWN_MAX = 60  # characters of a value shown in a message
EXPECTED_ERRORS = (FreeholdError, RequestValidationError, HTTPException, Exception)


def error_body(error: FreeholdError) -> dict[str, Any]:
    fields = {"message": error.message, "type": error.type, "param": error.field, "code": error.status}
    # OpenAI's clients read `error`, others the top level.
    return {"error": fields, "object": "error", **fields}


def anthropic_error(error: FreeholdError) -> dict[str, Any]:
    kind = "api_error" if error.type == "server_error" else error.type
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def responses_error(error: FreeholdError) -> dict[str, Any]:
    """Format an error as a stream event."""
    return {"type": "error", "code": error.type, "message": error.message, "param": error.field}


def as_api_error(error: Exception) -> FreeholdError:
    """Convert any exception, including those of the HTTP libraries, to an error with a status."""
    if isinstance(error, RequestValidationError):
        return _validation_error(error)
    if isinstance(error, HTTPException):
        return FreeholdError(str(error.detail), status=error.status_code)
    return as_freehold_error(error)


def _validation_error(error: RequestValidationError) -> BadRequest:
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, BadRequest):
        return cause
    if first["type"] == "json_invalid":
        return BadRequest(f"the body is not valid JSON: {first.get('ctx', {}).get('error', '')}")
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path") and not _is_kind(str(part))]
    if not where:
        return BadRequest(_wrong_body(first))
    if first["type"] == "missing":
        return BadRequest(f"{'.'.join(where)}: is required", where[0])
    return BadRequest(f"{'.'.join(where)}: {first['msg']}, got {_shown(first.get('input'))}", where[0])


def _is_kind(part: str) -> bool:
    """Return whether this part of Pydantic's error location is a union branch, such as list[int]."""
    return part in ("str", "int", "float", "bool", "dict") or not part.replace("_", "a").isalnum()


def _wrong_body(detail: dict[str, Any]) -> str:
    given = detail.get("input")
    if given is None:
        return "the body is missing: send a JSON object"
    if isinstance(given, bytes):
        return "the body is not taken for JSON: send it with the header 'Content-Type: application/json'"
    return f"the body must be a JSON object, not {_shown(given)}"


def _shown(value: Any) -> str:
    """Format a value for a message, never a whole body."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = orjson.dumps(value, default=str).decode()
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]} ..."


async def respond_with_error(request: Request, error: Exception) -> Response:
    """Handle every exception."""
    return error_response(as_api_error(error), request.url.path, dict(getattr(error, "headers", None) or {}))


def error_response(error: FreeholdError, path: str, headers: dict[str, str]) -> Response:
    """Format an error for the path's API, with `headers` and those that its status requires."""
    if isinstance(error, TooManyRequests):
        headers["Retry-After"] = str(max(math.ceil(error.retry_after), 1))
    elif error.status == 503:
        headers["Retry-After"] = "1"
    shape = anthropic_error if path.startswith("/v1/messages") else error_body
    return Response(orjson.dumps(shape(error)), error.status, headers, "application/json")
