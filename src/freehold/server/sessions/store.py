"""Sessions on disk: what must survive a restart, and a kill."""

from __future__ import annotations

import contextlib
import fcntl
import json
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from freehold.errors import StoreFailed
from freehold.server.sqlite_errors import failing_as

UNSTORED = "the session store can't be written"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, tokens BLOB NOT NULL, turns INTEGER NOT NULL, messages TEXT NOT NULL, settings TEXT NOT NULL
)
"""


@dataclass(frozen=True)
class StoredSession:
    """`ends` are the lengths of the history after each turn."""

    id: str
    tokens: list[int]
    ends: list[int]
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])


class SessionStore:
    """SQLite with a write-ahead log: a turn is on disk before its last event is sent. Without a path
    nothing is kept. One server at a time has it."""

    def __init__(self, path: str | None, recover: bool = False):
        """Raises ValueError if the file can't be used. With `recover` a damaged one is put aside, and what can be read
        of it is kept."""
        self._database: sqlite3.Connection | None = None
        self._lock: IO[str] | None = None
        self._deleted: set[str] = set()  # that the disk could not be told
        if path is None:
            return
        self._lock = _lock(Path(path))
        try:
            self._database = _opened(Path(path))
        except sqlite3.OperationalError as error:
            self.close()
            raise ValueError(f"session_store: {path} can't be opened: {error}") from None
        except sqlite3.DatabaseError as error:
            if not recover:
                self.close()
                raise ValueError(
                    f"session_store: {path} is damaged ({error}). Start with --session-store-recover to keep what can "
                    "be read"
                ) from None
            self._database = _recovered(Path(path))

    def __iter__(self) -> Iterator[StoredSession]:
        for row in [] if self._database is None else self._database.execute("SELECT * FROM sessions"):
            yield _session(row)

    def save(self, session: StoredSession) -> None:
        """Raises StoreFailed; then the disk has what it had."""
        if self._database is not None:
            with failing_as(UNSTORED):
                self._catch_up(self._database)
                _write(self._database, session)

    def delete(self, name: str) -> None:
        """On disk as soon as there is room for that."""
        self._deleted.add(name)
        if self._database is not None:
            with contextlib.suppress(StoreFailed), failing_as(UNSTORED):
                self._catch_up(self._database)

    def _catch_up(self, database: sqlite3.Connection) -> None:
        for name in list(self._deleted):
            database.execute("DELETE FROM sessions WHERE id = ?", (name,))
            self._deleted.discard(name)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _lock(path: Path) -> IO[str]:
    """Held as long as the file is open, also by a process that is killed. Raises ValueError."""
    try:
        file = open(f"{path}.lock", "w")  # noqa: SIM115, it is the lock
    except OSError as error:
        raise ValueError(f"session_store: {path} can't be opened: {error}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"session_store: {path} is in use by another server") from None
    return file


def _opened(path: Path) -> sqlite3.Connection:
    """Raises sqlite3.DatabaseError for what is none."""
    database = sqlite3.connect(path, isolation_level=None)
    try:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")
        (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        database.execute(_SCHEMA)
        for row in database.execute("SELECT * FROM sessions"):
            _session(row)
    except BaseException:
        database.close()
        raise
    return database


def _recovered(path: Path) -> sqlite3.Connection:
    """A new store with the sessions of a damaged one that can be read. The old one is put aside."""
    aside = path.with_name(f"{path.name}.damaged-{int(time.time())}")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    database = _opened(path)
    old = sqlite3.connect(aside)
    with contextlib.closing(old), contextlib.suppress(sqlite3.DatabaseError):
        for (name,) in old.execute("SELECT id FROM sessions").fetchall():
            with contextlib.suppress(sqlite3.DatabaseError):
                row = old.execute("SELECT * FROM sessions WHERE id = ?", (name,)).fetchone()
                _write(database, _session(row))
    return database


def _session(row: tuple[Any, ...]) -> StoredSession:
    """Raises sqlite3.DatabaseError for one that can't be."""
    try:
        name, tokens, turns, messages, settings = row
        ids: list[int] = np.frombuffer(tokens, np.int32).tolist()
        kept = json.loads(settings)
        # Where the ends were not kept, all turns count as the last one.
        ends: list[int] = kept.pop("ends", [len(ids)] * turns)
        return StoredSession(name, ids, ends, json.loads(messages), kept)
    except (ValueError, TypeError) as error:
        raise sqlite3.DatabaseError(f"a session can't be read: {error}") from error


def _write(database: sqlite3.Connection, session: StoredSession) -> None:
    tokens = np.array(session.tokens, np.int32).tobytes()
    settings = json.dumps({**session.settings, "ends": session.ends})
    row = (session.id, tokens, len(session.ends), json.dumps(session.messages), settings)
    database.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?)", row)
