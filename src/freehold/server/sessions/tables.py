"""The tables in which sessions are stored."""

from __future__ import annotations

import sqlite3

# A turn is a row that never changes. `before` is the number of the turn that it continues.
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
SELECT CAST(id AS TEXT) FROM sessions
    WHERE NOT coalesce(CASE WHEN json_valid(settings) THEN json_type(settings) = 'object' END, 0)
UNION SELECT turns.session FROM turns
    LEFT JOIN sessions ON sessions.id = turns.session
    LEFT JOIN turns AS prior ON prior.session = turns.session AND prior.number = turns.before
    WHERE NOT coalesce(
        sessions.id IS NOT NULL AND typeof(turns.added) = 'blob' AND length(turns.added) % 4 = 0
        AND turns.asked BETWEEN 0 AND length(turns.added) / 4 AND turns.turns >= 0
        AND turns.said NOT GLOB '*[^ -~]*' AND CASE WHEN json_valid(turns.said) THEN json_type(turns.said) = 'array' END
        AND CASE WHEN turns.before IS NULL THEN turns.start = 0 ELSE
            prior.number < turns.number AND turns.start BETWEEN 0 AND prior.start + length(prior.added) / 4 END,
        0)
UNION SELECT points.session FROM points
    LEFT JOIN sessions ON sessions.id = points.session
    LEFT JOIN turns ON turns.session = points.session AND turns.number = points.number
    WHERE sessions.id IS NULL OR turns.number IS NULL
"""


class SessionTables:
    noun = "sessions"
    names: tuple[str, ...] = ("sessions", "turns", "points")

    def prepare(self, connection: sqlite3.Connection) -> None:
        columns = [name for (_, name, *_) in connection.execute("PRAGMA table_info(sessions)")]
        if "tokens" in columns:
            connection.execute("ALTER TABLE sessions RENAME TO whole_sessions")
        for statement in [*_SCHEMA, *(_FROM_ROWS if "tokens" in columns else ())]:
            connection.execute(statement)

    def damaged(self, connection: sqlite3.Connection) -> list[str]:
        return [name for (name,) in connection.execute(_DAMAGED)]

    def entries(self, connection: sqlite3.Connection) -> int:
        (found,) = connection.execute("SELECT count(*) FROM sessions").fetchone()
        return int(found)

    def delete(self, connection: sqlite3.Connection, name: str) -> None:
        connection.execute("DELETE FROM sessions WHERE id = ?", (name,))
        for table in ("turns", "points"):
            connection.execute(f"DELETE FROM {table} WHERE session = ?", (name,))
