"""Sessions on disk: what must survive a restart, and a kill."""

from __future__ import annotations

import contextlib
import fcntl
import json
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from freehold.arrays import Int32
from freehold.conversation import Conversation
from freehold.errors import StoreFailed
from freehold.server.sqlite_errors import failing_as

UNSTORED = "the session store can't be written"
UNREAD = "the session can't be read from the store"
TOKEN_BYTES = 4
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, tokens BLOB NOT NULL, turns INTEGER NOT NULL, messages TEXT NOT NULL, settings TEXT NOT NULL
)
"""
# Tokens are not read, only how many bytes they have: NULL if they are no bytes.
_SUMMARIES = """
SELECT id, CASE typeof(tokens) WHEN 'blob' THEN length(tokens) END, turns, messages, settings FROM sessions
"""


@dataclass(frozen=True)
class StoredSession:
    """What is known of a session without its history, which has so many tokens and turns."""

    id: str
    tokens: int
    turns: int
    settings: dict[str, Any]


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

    @property
    def is_on_disk(self) -> bool:
        return self._database is not None

    def __iter__(self) -> Iterator[StoredSession]:
        yield from [] if self._database is None else _summaries(self._database)

    def load(self, name: str) -> Conversation:
        """One that was saved. Raises StoreFailed if it can't be read."""
        assert self._database is not None
        with failing_as(UNREAD):
            return _loaded(self._database, name)[0]

    def save(self, name: str, conversation: Conversation, settings: dict[str, Any]) -> None:
        """Raises StoreFailed; then the disk has what it had."""
        if self._database is not None:
            with failing_as(UNSTORED):
                self._catch_up(self._database)
                _write(self._database, name, conversation, settings)

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
        for _ in _summaries(database):
            pass
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
                _write(database, name, *_loaded(old, name))
    return database


def _summaries(database: sqlite3.Connection) -> Iterator[StoredSession]:
    """One at a time, messages and settings checked. Raises sqlite3.DatabaseError for a row that can't be read."""
    with _damage():
        for name, size, turns, messages, settings in database.execute(_SUMMARIES):
            kept = json.loads(settings)
            _ends(kept, size, turns)
            json.loads(messages)
            yield StoredSession(name, size // TOKEN_BYTES, turns, kept)


def _loaded(database: sqlite3.Connection, name: str) -> tuple[Conversation, dict[str, Any]]:
    """The history and the settings of a session. Raises sqlite3.DatabaseError if they can't be read."""
    with _damage():
        found = database.execute("SELECT tokens, turns, messages, settings FROM sessions WHERE id = ?", (name,))
        tokens, turns, messages, settings = found.fetchone()
        json.loads(messages)
        kept = json.loads(settings)
        ends = _ends(kept, len(tokens), turns)
        return Conversation((np.frombuffer(tokens, np.int32),), ends, messages), kept


def _ends(settings: dict[str, Any], size: int, turns: int) -> Int32:
    """Taken out of the settings. Where they were not kept, all turns count as the last one."""
    if size % TOKEN_BYTES:
        raise ValueError(f"{size} bytes are no whole number of tokens")
    return np.array(settings.pop("ends", [size // TOKEN_BYTES] * turns), np.int32)


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Raises sqlite3.DatabaseError for a row that makes no sense, texts that are none included."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, OverflowError, sqlite3.OperationalError) as error:
        raise sqlite3.DatabaseError(f"a session can't be read: {error}") from error


def _write(database: sqlite3.Connection, name: str, conversation: Conversation, settings: dict[str, Any]) -> None:
    tokens = b"".join(part.data for part in conversation.parts)
    kept = json.dumps({**settings, "ends": conversation.ends.tolist()})
    row = (name, tokens, conversation.turns, conversation.messages, kept)
    database.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?)", row)
