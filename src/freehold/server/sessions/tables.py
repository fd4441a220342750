"""The database tables of sessions."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import fields
from types import NoneType

from freehold.server.sessions.settings import SessionSettings

# A turn is an immutable row. `before` is the number of the turn that it continues.
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, settings TEXT NOT NULL, adapter TEXT NOT NULL)",
    """CREATE TABLE IF NOT EXISTS turns (
        session TEXT NOT NULL, number INTEGER NOT NULL, before INTEGER, start INTEGER NOT NULL, asked INTEGER NOT NULL,
        turns INTEGER NOT NULL, forgets INTEGER NOT NULL, said TEXT NOT NULL, added BLOB NOT NULL,
        PRIMARY KEY (session, number)
    )""",
    """CREATE TABLE IF NOT EXISTS points (
        session TEXT NOT NULL, name TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (session, name)
    )""",
)
# In earlier versions a session was one row with its whole history.
_FROM_ROWS = (
    "DELETE FROM whole_sessions WHERE CASE WHEN json_valid(settings) THEN json_extract(settings, '$.branching') END",
    """INSERT INTO sessions
        SELECT id, CASE WHEN json_valid(settings) THEN json_remove(settings, '$.ends') ELSE settings END, ''
        FROM whole_sessions""",
    """INSERT INTO turns SELECT id, 1, NULL, 0, length(tokens) / 4, turns, 0, messages, tokens FROM whole_sessions
        WHERE turns > 0 OR length(tokens) > 0""",
    "INSERT INTO points SELECT session, '', number FROM turns",
    "DROP TABLE whole_sessions",
)
_DAMAGED = """
SELECT CAST(id AS BLOB) FROM sessions
    WHERE NOT coalesce(
        typeof(id) = 'text' AND is_utf8(CAST(id AS BLOB))
        AND typeof(adapter) = 'text' AND is_utf8(CAST(adapter AS BLOB))
        AND are_settings_of(CAST(settings AS BLOB), CAST(id AS BLOB)),
        0)
UNION SELECT CAST(turns.session AS BLOB) FROM turns
    LEFT JOIN sessions ON sessions.id = turns.session
    LEFT JOIN turns AS prior ON prior.session = turns.session AND prior.number = turns.before
    WHERE NOT coalesce(
        sessions.id IS NOT NULL AND typeof(turns.added) = 'blob' AND length(turns.added) % 4 = 0
        AND turns.asked BETWEEN 0 AND length(turns.added) / 4 AND turns.turns >= 0
        AND turns.said NOT GLOB '*[^ -~]*' AND CASE WHEN json_valid(turns.said) THEN json_type(turns.said) = 'array' END
        AND CASE WHEN turns.before IS NULL THEN turns.start = 0 ELSE
            prior.number < turns.number AND turns.start BETWEEN 0 AND prior.start + length(prior.added) / 4 END,
        0)
UNION SELECT CAST(points.session AS BLOB) FROM points
    LEFT JOIN sessions ON sessions.id = points.session
    LEFT JOIN turns ON turns.session = points.session AND turns.number = points.number
    WHERE sessions.id IS NULL OR turns.number IS NULL
        OR NOT (typeof(points.name) = 'text' AND is_utf8(CAST(points.name AS BLOB)))
UNION SELECT CAST(session AS BLOB) FROM turns WHERE (session, number) NOT IN (
    SELECT session, before FROM turns WHERE before IS NOT NULL UNION ALL SELECT session, number FROM points)
"""
# A linear session has one point, its newest turn.
_MEND = """
INSERT INTO points SELECT session, '', max(number) FROM turns
    WHERE session NOT IN (SELECT session FROM points) AND session IN (
        SELECT id FROM sessions WHERE CASE WHEN json_valid(settings) THEN NOT json_extract(settings, '$.branching') END)
    GROUP BY session
"""
_KINDS = {
    "timeout": (float, int, NoneType), "capacity": (int, NoneType), "namespace": (str,), "branching": (bool,),
    "owner": (str,),
}  # fmt: skip
assert {*_KINDS} == {one.name for one in fields(SessionSettings)}


class SessionTables:
    noun = "sessions"
    names: tuple[str, ...] = ("sessions", "turns", "points")

    def prepare(self, connection: sqlite3.Connection) -> None:
        columns = [name for (_, name, *_) in connection.execute("PRAGMA table_info(sessions)")]
        if "tokens" in columns:
            connection.execute("ALTER TABLE sessions RENAME TO whole_sessions")
        for statement in [*_SCHEMA, *(_FROM_ROWS if "tokens" in columns else ())]:
            connection.execute(statement)

    def damaged(self, connection: sqlite3.Connection) -> list[bytes | None]:
        connection.create_function("are_settings_of", 2, _are_settings_of, deterministic=True)
        return [name for (name,) in connection.execute(_DAMAGED)]

    def prune(self, connection: sqlite3.Connection) -> None:
        connection.execute(_MEND)
        damaged = self.damaged(connection)
        for table, column in (("sessions", "id"), ("turns", "session"), ("points", "session")):
            statement = f"DELETE FROM {table} WHERE CAST({column} AS BLOB) IS ?"
            connection.executemany(statement, [(name,) for name in damaged])

    def entries(self, connection: sqlite3.Connection) -> int:
        (found,) = connection.execute("SELECT count(*) FROM sessions").fetchone()
        return int(found)

    def delete(self, connection: sqlite3.Connection, name: str) -> None:
        connection.execute("DELETE FROM sessions WHERE id = ?", (name,))
        for table in ("turns", "points"):
            connection.execute(f"DELETE FROM {table} WHERE session = ?", (name,))


def _are_settings_of(settings: bytes | None, name: bytes | None) -> bool:
    """Return whether a session of this name could have these settings, in JSON."""
    try:
        found = json.loads(settings or b"")
    except ValueError:
        return False
    if not isinstance(found, dict) or not all(type(found[key]) in _KINDS.get(key, ()) for key in found):
        return False
    owner = found.get("owner", "")
    return (name or b"").startswith(f"{owner}/".encode() if owner else b"")
