"""One line of JSON per request: client, cost and outcome, never content."""

from __future__ import annotations

import sys
import time
import uuid
from dataclasses import dataclass, field

import orjson

from freehold.ipc.protocol import Ended

ID_LENGTH_MAX = 128


def request_id(given: str | None) -> str:
    """Return the client's `x-request-id` if valid, or a new id."""
    if given is not None and 0 < len(given) <= ID_LENGTH_MAX and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


@dataclass
class Record:
    """What is known of a request so far. In seconds; `first_token` counts from the request's arrival."""

    id: str
    client: str
    route: str
    traceparent: str | None = None  # of the caller's span
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queued: float | None = None
    first_token: float | None = None
    ends: list[str] = field(default_factory=list[str])

    def sampled(self) -> None:
        """Note the arrival of a token."""
        if self.first_token is None:
            self.first_token = time.monotonic() - self.started

    def ended(self, end: Ended) -> None:
        """Add the numbers of an ended output."""
        self.prompt_tokens += end.prompt_tokens
        self.cached_tokens += end.cached_tokens
        self.output_tokens += end.output_tokens
        self.queued = end.queued if self.queued is None else max(self.queued, end.queued)
        self.ends.append(end.kind)

    def write(self) -> None:
        """Write the record to stderr."""
        known = {
            "time": time.time(),
            "request_id": self.id,
            "client": self.client,
            "route": self.route,
            "status": self.status,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "queued_s": None if self.queued is None else round(self.queued, 4),
            "first_token_s": None if self.first_token is None else round(self.first_token, 4),
            "total_s": round(time.monotonic() - self.started, 4),
            "end": ",".join(self.ends) or None,
        }
        print(orjson.dumps(known).decode(), file=sys.stderr, flush=True)
