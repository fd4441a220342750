"""The sessions of a scenario, as a server keeps them: the tokens of finished turns, one turn at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from freehold.scheduler.request import Request
from freehold.simulation.happenings import Verb
from freehold.simulation.scenario import LONGEST


class Conversations:
    """`forget` tells the scheduler that a session is closed; `parked` names the sessions with a parked tail."""

    def __init__(self, forget: Callable[[str], None], parked: Callable[[], Collection[str]]):
        self._forget = forget
        self._parked = parked
        self._histories: dict[str, list[int]] = {}  # the tokens of finished turns
        self._closing: set[str] = set()
        self._closed: set[str] = set()
        self._busy: dict[str, str] = {}  # session -> the request of its current turn

    @property
    def turns(self) -> list[tuple[str, str]]:
        """The sessions with a running turn, and its request."""
        return list(self._busy.items())

    def begin_turn(self, fields: dict[str, Any]) -> list[int] | None:
        """Return the whole prompt of a session's turn; None while another turn is running."""
        name = fields["session"]
        if name in self._busy:
            return None
        history = self._histories.get(name) or fields["first"]
        if len(history) + len(fields["prompt"]) + fields["max_tokens"] > LONGEST:
            self._histories.pop(name, None)  # too long to continue: it starts over
            history = fields["first"]
        self._busy[name] = fields["id"]
        return [*history, *fields["prompt"]]

    def commit(self, session: str, request: Request) -> None:
        """End a turn. If it is complete, add it to the history."""
        if request.finish is not None and request.finish.is_complete:
            self._histories[session] = request.tokens.tolist()
            self._closed.discard(session)
        self.end_turn(session)

    def end_turn(self, session: str) -> None:
        del self._busy[session]
        if session in self._closing:
            self._close(session)

    def edit(self, verb: Verb, arguments: dict[str, Any]) -> None:
        """Edit a session between turns. A close during a turn takes effect at its end; other edits are then dropped."""
        name, target = arguments["session"], arguments.get("to", arguments["session"])
        if verb is Verb.CLOSE and name in self._busy:
            self._closing.add(name)
        if name in self._busy or target in self._busy:
            return
        history = self._histories.get(name, [])
        if verb is Verb.FORK:
            self._histories[target] = list(history)
        elif verb is Verb.REWIND:
            self._histories[name] = history[: int(arguments["share"] * len(history))]
        else:
            self._close(name)

    def _close(self, name: str) -> None:
        self._histories.pop(name, None)
        self._forget(name)
        self._closing.discard(name)
        self._closed.add(name)
        assert name not in self._parked(), f"session {name} is closed, its tail is still parked"

    def check(self) -> None:
        """Check that no closed session has a parked tail."""
        left = self._closed & set(self._parked())
        assert not left, f"tails of closed sessions: {left}"
