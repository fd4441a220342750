"""Sessions without HTTP: a table on an engine that notes what it is told, and turns as routes take them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np

from freehold.ipc.protocol import Ended
from freehold.ipc.streams import Delta
from freehold.server.access.clients import Client
from freehold.server.database import Database, open_database
from freehold.server.sessions.store import SessionStore
from freehold.server.sessions.table import Session, SessionTable, Turn
from freehold.server.sessions.turns import closed_on_failure
from freehold.text.answers.events import Content


class Engine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []
        self.aborted: list[str] = []

    def forget_session(self, name: str) -> None:
        self.forgotten.append(name)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def database(path: Path | str | None, recover: bool = False, sync: str = "normal") -> Database:
    return open_database(None if path is None else str(path), [SessionStore.tables], sync, recover)


class Opened:
    """A table, and what is around it. Each call runs a coroutine to its end."""

    def __init__(
        self, path: Path | str | None = None, memory_bytes: int = 1 << 20, clock: Callable[[], float] | None = None,
        recover: bool = False,
    ):  # fmt: skip
        self.loop = asyncio.new_event_loop()
        self.engine = Engine()
        self.database = database(path, recover)
        self.store = SessionStore(self.database)
        clocks = {} if clock is None else {"clock": clock}
        self.table = SessionTable(self.engine, self.store, memory_bytes, **clocks)

    def __call__(self, work):
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self(asyncio.sleep(0))
        self.database.close()
        self.loop.close()

    @property
    def names(self) -> list[str]:
        return sorted(session.id for session in self.table)

    def session(self, name: str) -> Session:
        return self.table.get(name, Client())

    def tokens(self, session: Session) -> list[int]:
        return self(self.table.conversation(session)).tokens.tolist()

    def begin(self, session: Session, new: list[int], said: str | None = None) -> Turn:
        """A turn that can't begin gives its place on."""
        turn = self.table.line_up(session)
        with closed_on_failure(turn):
            turn.begin(self(self.table.conversation(session)), np.array(new, np.int32), said)
        return turn

    def turn(self, session: Session, new: list[int], output: list[int]) -> None:
        self(self.begin(session, new).observe(news(output, "x", "stop")))


def news(tokens: list[int], text: str = "", kind: str | None = None) -> Delta:
    end = None if kind is None else Ended("r", kind, 1, 0, 1, 0, 0.0)
    return Delta(0, text, tokens, [], end, events=[Content(text)])
