"""Requests held back while their grammar compiles."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from freehold.config import EngineConfig
from freehold.contract.constraint import Constraint
from freehold.contract.errors import FreeholdError, InvalidParameter, QueueFull
from freehold.scheduler.request import Request


class GrammarCompiler(Protocol):
    """`freehold.engine.grammar.compiler.Grammars`."""

    def get(self, constraint: Constraint) -> Future[Any]: ...

    def settle(self) -> None: ...


class Parked:
    """`wake` is called by another thread when a grammar is ready. Requests keep their arrival time."""

    def __init__(self, grammars: GrammarCompiler | None, wake: Callable[[], None], config: EngineConfig):
        self._grammars = grammars
        self._wake = wake
        self._config = config
        self._requests: dict[str, tuple[Request, Future[Any]]] = {}
        self.failure_count = 0  # requests whose grammar failed to compile

    def __len__(self) -> int:
        return len(self._requests)

    def park(self, request: Request, waiting: int, now: float) -> bool:
        """Park the request if its grammar is still compiling, else set it. Return whether it was parked. `waiting`
        counts the queued requests. Raise InvalidParameter, QueueFull or Unavailable."""
        constraint = request.params.constraint
        if constraint is None:
            return False
        if self._grammars is None:
            raise InvalidParameter(constraint.field, "constrained output is switched off (--grammar-backend none)")
        if request.id in self._requests:
            raise InvalidParameter("rid", f"request id {request.id} is already in flight")
        compiled = self._grammars.get(constraint)
        if compiled.done():
            self.failure_count += compiled.exception() is not None
            request.grammar = compiled.result()
            return False
        if waiting + len(self._requests) >= self._config.max_queued_requests:
            raise QueueFull(f"{waiting + len(self._requests)} requests are waiting")
        request.arrival = now
        self._requests[request.id] = request, compiled
        compiled.add_done_callback(lambda _: self._wake())
        return True

    def take(self, name: str) -> Request | None:
        """Remove and return a request, without its grammar."""
        found = self._requests.pop(name, None)
        return None if found is None else found[0]

    def ready(self, now: float) -> list[tuple[Request, FreeholdError | None]]:
        """Return requests whose grammar compiled or failed, with the error; and those timed out, without a grammar."""
        if not self._requests:
            return []
        assert self._grammars is not None
        self._grammars.settle()
        found: list[tuple[Request, FreeholdError | None]] = []
        for name, (request, compiled) in list(self._requests.items()):
            is_late = any(limit is not None and now >= request.arrival + limit for limit in self._limits(request))
            if not compiled.done() and not is_late:
                continue
            del self._requests[name]
            error = compiled.exception() if compiled.done() else None
            self.failure_count += error is not None
            if compiled.done() and error is None:
                request.grammar = compiled.result()
            if error is not None and not isinstance(error, FreeholdError):
                raise error
            found.append((request, error))
        return found

    def _limits(self, request: Request) -> tuple[float | None, float | None]:
        whole = self._config.request_timeout if request.timeout is None else request.timeout
        return whole, self._config.waiting_timeout
