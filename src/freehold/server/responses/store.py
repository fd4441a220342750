"""Responses that later ones can continue, each complete in itself."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from freehold.contract.errors import NotFound
from freehold.server.database import Database
from freehold.server.sqlite_errors import failing_as

POINTS_MAX = 10_000
BYTES_MAX = 256 << 20

UNSTORED, UNREAD = "the response can't be stored", "the response can't be read"
_DAMAGED = """
SELECT CAST(id AS BLOB) FROM responses WHERE NOT coalesce(
    typeof(tokens) = 'blob' AND length(tokens) % 4 = 0 AND typeof(size) = 'integer'
    AND is_utf8(CAST(id AS BLOB)) AND is_utf8(CAST(owner AS BLOB)) AND is_utf8(CAST(fields AS BLOB))
    AND CASE WHEN json_valid(fields) THEN json_type(fields) = 'object' END, 0)
"""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, expires REAL NOT NULL, size INTEGER NOT NULL,
    tokens BLOB NOT NULL, fields TEXT NOT NULL
)
"""
_INDEX = "CREATE INDEX IF NOT EXISTS responses_of_owners ON responses (owner, size)"
# Take from the owner with the most, so that no client evicts the responses of others.
_OLDEST_OF_MOST = """rowid = (SELECT MIN(rowid) FROM responses WHERE owner = (
    SELECT owner FROM responses GROUP BY owner ORDER BY {} DESC LIMIT 1))"""


@dataclass(frozen=True)
class StoredResponse:
    """A stored response. `response` is as the client got it, `items` is its input. `messages` are the whole chat with
    the answer, `tokens` the same as the model saw it."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    tokens: list[int]

    @property
    def id(self) -> str:
        return self.response["id"]


class ResponseTables:
    noun = "responses"
    names: tuple[str, ...] = ("responses",)

    def prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute(_SCHEMA)
        connection.execute(_INDEX)

    def damaged(self, connection: sqlite3.Connection) -> list[bytes | None]:
        return [name for (name,) in connection.execute(_DAMAGED)]

    def entries(self, connection: sqlite3.Connection) -> int:
        return _sum(connection, "SELECT count(*) FROM responses")

    def prune(self, connection: sqlite3.Connection) -> None:
        damaged = [(name,) for name in self.damaged(connection)]
        connection.executemany("DELETE FROM responses WHERE CAST(id AS BLOB) IS ?", damaged)


class ResponseStore:
    """Responses in a database. Beyond the limit, the oldest of the largest owner are evicted. Each can be continued for
    `ttl` seconds, which restart with the server: `clock` is monotonic."""

    tables = ResponseTables()

    def __init__(self, database: Database, ttl: float, clock: Callable[[], float] = time.monotonic):
        self._database = database
        self._ttl = ttl
        self._clock = clock
        database.submit(lambda it: it.execute("UPDATE responses SET expires = ?", (clock() + ttl,))).result()
        self._size = database.submit(lambda it: _sum(it, "SELECT COALESCE(SUM(size), 0) FROM responses")).result()

    async def put(self, stored: StoredResponse, owner: str) -> None:
        """Store a response. Raises StoreFailed."""
        with failing_as(UNSTORED):
            await self._database.run(lambda connection: self._put(connection, stored, owner))

    async def get(self, name: str, owner: str | None, field: str | None = None) -> StoredResponse:
        """Return a response of `owner`, or of any owner if None. Raises NotFound naming `field`, or StoreFailed."""
        question = "SELECT tokens, fields FROM responses WHERE id = ? AND expires >= ? AND (?3 IS NULL OR owner = ?3)"
        values = (name, self._clock(), owner)
        with failing_as(UNREAD):
            row = await self._database.run(lambda connection: connection.execute(question, values).fetchone())
        if row is None:
            raise NotFound(f"there is no response '{name}'", field)
        tokens, fields = row
        return StoredResponse(tokens=np.frombuffer(tokens, np.int32).tolist(), **orjson.loads(fields))

    async def delete(self, name: str) -> None:
        """Delete a response. Raises StoreFailed."""
        with failing_as(UNSTORED):
            await self._database.run(lambda connection: self._forget(connection, "id = ?", name))

    def _put(self, connection: sqlite3.Connection, stored: StoredResponse, owner: str) -> None:
        tokens = np.array(stored.tokens, np.int32).tobytes()
        fields = orjson.dumps({"response": stored.response, "items": stored.items, "messages": stored.messages})
        size = len(tokens) + len(fields)
        self._forget(connection, "expires < ?", self._clock())
        row = (stored.id, owner, self._clock() + self._ttl, size, tokens, fields.decode())
        connection.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
        self._size += size
        while self._size > BYTES_MAX:
            self._forget(connection, _OLDEST_OF_MOST.format("SUM(size)"))
        while _sum(connection, "SELECT COUNT(*) FROM responses") > POINTS_MAX:
            self._forget(connection, _OLDEST_OF_MOST.format("COUNT(*)"))

    def _forget(self, connection: sqlite3.Connection, where: str, *values: Any) -> None:
        gone = connection.execute(f"DELETE FROM responses WHERE {where} RETURNING size", values).fetchall()
        self._size -= sum(size for (size,) in gone)


def _sum(connection: sqlite3.Connection, question: str) -> int:
    (found,) = connection.execute(question).fetchone()
    return int(found)
