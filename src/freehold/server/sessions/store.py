"""Sessions on disk: what must survive a restart, and a kill."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from freehold.conversation import Conversation
from freehold.server.database import Database, transaction
from freehold.server.sessions.history import Change, History
from freehold.server.sessions.tables import SessionTables
from freehold.server.sqlite_errors import failing_as

UNSTORED = "the session store can't be written"
UNREAD = "the session can't be read from the store"
_SUMMARIES = """
SELECT sessions.id, sessions.settings, sessions.adapter, coalesce(turns.start + length(turns.added) / 4, 0),
    coalesce(turns.turns, 0), coalesce((SELECT max(number) FROM turns WHERE session = sessions.id), 0)
FROM sessions
LEFT JOIN points ON points.rowid = (SELECT max(rowid) FROM points WHERE session = sessions.id)
LEFT JOIN turns ON turns.session = points.session AND turns.number = points.number
"""
_TURNS = """
SELECT number, before, start, asked, turns, forgets, said, added FROM turns WHERE session = ? ORDER BY number
"""


@dataclass(frozen=True)
class SessionRow:
    """What is stored of a session beside its history: its name, its settings, and the adapter of its newest turn."""

    id: str
    settings: dict[str, Any]
    adapter: str


@dataclass(frozen=True)
class StoredSession:
    """What is known of a session without its history, whose newest point has so many tokens and turns. No turn has a
    number above `last`."""

    row: SessionRow
    tokens: int
    turns: int
    last: int


class SessionStore:
    """A turn is on disk before its last event is sent, and writes no other turns again. Nothing is kept by a database
    in memory."""

    tables = SessionTables()

    def __init__(self, database: Database):
        self._database = database
        self._closed: set[str] = set()  # that the disk could not be told; of the database's thread

    @property
    def is_on_disk(self) -> bool:
        return self._database.is_file

    def __iter__(self) -> Iterator[StoredSession]:
        """At the start."""
        rows = self._database.submit(lambda connection: connection.execute(_SUMMARIES).fetchall()).result()
        for name, settings, adapter, *known in rows:
            yield StoredSession(SessionRow(name, json.loads(settings), adapter), *known)

    async def load(self, name: str) -> History:
        """One that was saved. Raises StoreFailed if it can't be read."""
        with failing_as(UNREAD):
            return await self._database.run(lambda connection: _loaded(connection, name))

    async def save(self, row: SessionRow, change: Change) -> None:
        """All of it or nothing, once what was closed before is deleted. Raises StoreFailed; then the disk has what it
        had."""
        if self.is_on_disk:
            with failing_as(UNSTORED):
                await self._database.run(lambda connection: self._save(connection, row, change))

    def delete(self, name: str) -> None:
        """On disk as soon as there is room for that."""
        if self.is_on_disk:
            self._database.submit(lambda connection: self._delete(connection, name))

    async def settle(self) -> None:
        """Until what was asked before has been done."""
        await self._database.run(lambda connection: None)

    def _save(self, connection: sqlite3.Connection, row: SessionRow, change: Change) -> None:
        self._catch_up(connection)
        with transaction(connection):
            _write(connection, row, change)

    def _delete(self, connection: sqlite3.Connection, name: str) -> None:
        self._closed.add(name)
        with contextlib.suppress(sqlite3.Error):
            self._catch_up(connection)

    def _catch_up(self, connection: sqlite3.Connection) -> None:
        for name in list(self._closed):
            with transaction(connection):
                self.tables.delete(connection, name)
            self._closed.discard(name)


def _write(connection: sqlite3.Connection, row: SessionRow, change: Change) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)", (row.id, json.dumps(row.settings), row.adapter)
    )
    connection.executemany(
        "DELETE FROM turns WHERE session = ? AND number = ?", [(row.id, number) for number in change.dropped]
    )
    connection.executemany(
        "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                row.id, one.number, None if one.before is None else one.before.number, one.start, one.asked, one.turns,
                one.forgets, one.said, one.added.tobytes(),
            )
            for one in change.added
        ],
    )  # fmt: skip
    connection.executemany(
        "DELETE FROM points WHERE session = ? AND name = ?", [(row.id, name) for name in change.gone]
    )
    # One that is another now is the newest: its row comes behind all.
    connection.executemany(
        "INSERT OR REPLACE INTO points VALUES (?, ?, ?)",
        [(row.id, name, point.number) for name, point in change.points.items()],
    )


def _loaded(connection: sqlite3.Connection, name: str) -> History:
    """Raises sqlite3.DatabaseError if it can't be read, or makes no sense."""
    try:
        turns: dict[int, Conversation] = {}
        for number, before, start, asked, count, forgets, said, added in connection.execute(_TURNS, (name,)):
            json.loads(said)
            tokens = np.frombuffer(added, np.int32)
            base = None if before is None else turns[before]
            turns[number] = Conversation(base, start, tokens, asked, count, said, bool(forgets), number)
        found = connection.execute("SELECT name, number FROM points WHERE session = ? ORDER BY rowid", (name,))
        points = {point: turns[number] for point, number in found}
    except (ValueError, TypeError, KeyError, sqlite3.OperationalError) as error:
        raise sqlite3.DatabaseError(f"{type(error).__name__}: {error}") from error
    history = History()
    history.apply(Change(points, (), tuple(turns.values())))
    return history
