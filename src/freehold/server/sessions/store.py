"""Sessions on disk: what must survive a restart, and a kill."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, tokens BLOB NOT NULL, turns INTEGER NOT NULL, messages TEXT NOT NULL, settings TEXT NOT NULL
)
"""


@dataclass(frozen=True)
class StoredSession:
    id: str
    tokens: list[int]
    turns: int
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])


class SessionStore:
    """SQLite with a write-ahead log: a turn is on disk before its last event is sent. Without a path
    nothing is kept."""

    def __init__(self, path: str | None):
        self._database = None if path is None else sqlite3.connect(Path(path), isolation_level=None)
        if self._database is not None:
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute(_SCHEMA)

    def __iter__(self) -> Iterator[StoredSession]:
        if self._database is None:
            return
        for name, tokens, turns, messages, settings in self._database.execute("SELECT * FROM sessions"):
            ids = np.frombuffer(tokens, np.int32).tolist()
            yield StoredSession(name, ids, turns, json.loads(messages), json.loads(settings))

    def save(self, session: StoredSession) -> None:
        if self._database is not None:
            tokens = np.array(session.tokens, np.int32).tobytes()
            row = (session.id, tokens, session.turns, json.dumps(session.messages), json.dumps(session.settings))
            self._database.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?)", row)

    def delete(self, name: str) -> None:
        if self._database is not None:
            self._database.execute("DELETE FROM sessions WHERE id = ?", (name,))

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None
