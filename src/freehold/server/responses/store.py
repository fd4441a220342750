"""Responses that later ones can continue from: points in histories, each complete in itself."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from freehold.errors import NotFound
from freehold.server.sqlite_errors import failing_as

POINTS_MAX = 10_000
BYTES_MAX = 256 << 20

UNSTORED = "the response can't be stored"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, expires REAL NOT NULL, size INTEGER NOT NULL,
    tokens BLOB NOT NULL, fields TEXT NOT NULL
)
"""


@dataclass(frozen=True)
class StoredResponse:
    """`response` is as the client got it, `items` what it had sent for it. `messages` are the whole chat, answer
    included; `tokens` the same as the model saw it."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    tokens: list[int]

    @property
    def id(self) -> str:
        return self.response["id"]


class ResponseStore:
    """SQLite, in memory without a path. The oldest go first when there are too many. Used by one thread at a time."""

    def __init__(self, path: str | None, ttl: float):
        self._ttl = ttl
        self._database = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        self._database.execute(_SCHEMA)
        self._size = self._sum("SELECT COALESCE(SUM(size), 0) FROM responses")

    def _sum(self, question: str) -> int:
        (found,) = self._database.execute(question).fetchone()
        return int(found)

    def put(self, stored: StoredResponse, owner: str) -> None:
        """Raises StoreFailed."""
        tokens = np.array(stored.tokens, np.int32).tobytes()
        fields = orjson.dumps({"response": stored.response, "items": stored.items, "messages": stored.messages})
        size = len(tokens) + len(fields)
        with failing_as(UNSTORED):
            self._forget("expires < ?", time.time())
            row = (stored.id, owner, time.time() + self._ttl, size, tokens, fields.decode())
            self._database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
            self._size += size
            while self._size > BYTES_MAX or self._sum("SELECT COUNT(*) FROM responses") > POINTS_MAX:
                self._forget("rowid = (SELECT MIN(rowid) FROM responses)")

    def get(self, name: str, owner: str | None, field: str | None = None) -> StoredResponse:
        """One of `owner`'s, of anybody's if that is None. Raises NotFound, which names the `field`."""
        row = self._database.execute(
            "SELECT tokens, fields FROM responses WHERE id = ? AND expires >= ? AND (?3 IS NULL OR owner = ?3)",
            (name, time.time(), owner),
        ).fetchone()
        if row is None:
            raise NotFound(f"there is no response '{name}'", field)
        tokens, fields = row
        return StoredResponse(tokens=np.frombuffer(tokens, np.int32).tolist(), **orjson.loads(fields))

    def delete(self, name: str) -> None:
        """Raises StoreFailed."""
        with failing_as(UNSTORED):
            self._forget("id = ?", name)

    def _forget(self, where: str, *values: Any) -> None:
        gone = self._database.execute(f"DELETE FROM responses WHERE {where} RETURNING size", values).fetchall()
        self._size -= sum(size for (size,) in gone)

    def close(self) -> None:
        self._database.close()
