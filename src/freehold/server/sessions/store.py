"""Sessions on disk, which survive restarts and kills."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from freehold.server.database import Database, transaction
from freehold.server.sessions.conversation import Conversation
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
    """What is stored of a session besides its history: its name, settings and the newest turn's adapter."""

    id: str
    settings: dict[str, Any]
    adapter: str


@dataclass(frozen=True)
class StoredSession:
    """A session without its history. `tokens` and `turns` are of the newest point; `last` is its highest turn
    number."""

    row: SessionRow
    tokens: int
    turns: int
    last: int


class SessionStore:
    """Sessions in a database. A turn is on disk before its last event is sent, and only its own row is written. Without
    a file nothing is stored."""

    tables = SessionTables()

    def __init__(self, database: Database):
        self._database = database
        self._closed: set[str] = set()  # sessions yet to be deleted; used only in the database's thread

    @property
    def is_on_disk(self) -> bool:
        return self._database.is_file

    def __iter__(self) -> Iterator[StoredSession]:
        """Yield all stored sessions. Call it only at start."""
        rows = self._database.submit(lambda connection: connection.execute(_SUMMARIES).fetchall()).result()
        for name, settings, adapter, *known in rows:
            yield StoredSession(SessionRow(name, json.loads(settings), adapter), *known)

    async def load(self, name: str) -> History:
        """Read a history. Raises StoreFailed if it can't be read."""
        with failing_as(UNREAD):
            return await self._database.run(lambda connection: _loaded(connection, name))

    async def save(self, row: SessionRow, change: Change) -> None:
        """Write a change atomically, after deleting earlier closed sessions. Raises StoreFailed, leaving the disk
        unchanged."""
        if self.is_on_disk:
            with failing_as(UNSTORED):
                await self._database.run(lambda connection: self._save(connection, row, change))

    def delete(self, name: str) -> None:
        """Delete a session. If the disk fails, the next write retries."""
        if self.is_on_disk:
            self._database.submit(lambda connection: self._delete(connection, name))

    async def settle(self) -> None:
        """Wait until earlier work is done."""
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
    # A replaced point becomes the newest: REPLACE gives it the highest rowid.
    connection.executemany(
        "INSERT OR REPLACE INTO points VALUES (?, ?, ?)",
        [(row.id, name, point.number) for name, point in change.points.items()],
    )


def _loaded(connection: sqlite3.Connection, name: str) -> History:
    """Read a history. Raises sqlite3.DatabaseError if it can't be read or is inconsistent."""
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
