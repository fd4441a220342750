"""Errors that a caller is meant to see. Each carries its HTTP status, its type and the field at fault."""

from __future__ import annotations

from typing import ClassVar

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class FreeholdError(Exception):
    """`field` is what the caller calls the value at fault, None if there is no such value."""

    default_status: ClassVar[int] = 500
    default_field: ClassVar[str | None] = None

    def __init__(self, message: str, field: str | None = None, status: int | None = None):
        super().__init__(message)
        self.message = message
        self.field = self.default_field if field is None else field
        self.status = self.default_status if status is None else status

    @property
    def type(self) -> str:
        """The word of OpenAI's API for the status."""
        return TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")


class BadRequest(FreeholdError, ValueError):
    """The request cannot be served as it is."""

    default_status = 400


class InvalidParameter(BadRequest):
    """A value is outside its limits. `field` names it as the caller spelled it."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}", field)


class TurnRefused(BadRequest):
    """The turn cannot be taken now, or not like that. Nothing has changed."""

    default_field = "session_id"


class ChatTemplateError(BadRequest):
    """The model's template refuses these messages."""

    default_field = "messages"


class KVMemoryExhausted(BadRequest):
    """The request alone has filled the KV memory."""


class Unauthorized(FreeholdError):
    """The key is wrong or missing."""

    default_status = 401


class Forbidden(FreeholdError):
    """The key does not open this."""

    default_status = 403


class NotFound(FreeholdError):
    """There is nothing of that name."""

    default_status = 404


class NoSuchSession(NotFound):
    """There is no open session of that name."""

    default_field = "session_id"


class Conflict(FreeholdError):
    """What is asked for can't be done in the state that there is now."""

    default_status = 409


class SessionBusy(Conflict):
    """The session is in use, or its name is."""

    default_field = "session_id"


class BodyTooLarge(FreeholdError):
    """The body has more bytes than this server takes."""

    default_status = 413


class TooManyRequests(FreeholdError):
    """The key's quota is used up for `retry_after` seconds."""

    default_status = 429

    def __init__(self, message: str, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(FreeholdError):
    """Not now: try again later."""

    default_status = 503


class StoreFailed(Unavailable):
    """The disk took nothing: what was to be stored has not happened."""


class SessionsFull(Unavailable):
    """The histories of sessions have all the memory that they may have."""

    default_field = "session_id"


class QueueFull(Unavailable):
    """Too many requests are waiting."""


class TimedOut(Unavailable):
    """The time for the request is up."""

    default_field = "timeout"


class EngineFailed(FreeholdError):
    """A step did not complete."""


class Aborted(FreeholdError):
    """Somebody has ended the request."""

    default_status = 499


class EngineUnavailable(Unavailable):
    """The engine is loading, draining or dead."""


class EngineStuck(Unavailable):
    """The engine has not answered for so long that it probably never will."""


class ModelUnavailable(BadRequest):
    """The model is not where it was looked for, or can't be read."""


def as_exception(error: BaseException) -> Exception:
    """Return the error, or one that names it: a panic of a library in Rust is a BaseException and no Exception."""
    return error if isinstance(error, Exception) else EngineFailed(f"{type(error).__name__}: {error}")


def as_freehold_error(error: BaseException) -> FreeholdError:
    """Return the error, or an internal one that names it."""
    if isinstance(error, FreeholdError):
        return error
    return FreeholdError(f"internal error: {type(error).__name__}: {error}")


def rebuilt(kind: str, message: str, field: str | None, status: int) -> FreeholdError:
    """Return the error of another process, of the class named `kind` if there is one here."""
    found = _CLASSES.get(kind, FreeholdError)
    error = found.__new__(found)
    FreeholdError.__init__(error, message, field, status)
    return error


_CLASSES = {
    name: value for name, value in globals().items() if isinstance(value, type) and issubclass(value, FreeholdError)
}
