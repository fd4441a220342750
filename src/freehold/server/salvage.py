"""What can be read of a damaged SQLite file."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

ROWID_MAX = (1 << 63) - 1
STEPS = 1000  # row numbers skipped one by one, more than a page has rows; then steps double


class _Text(bytes):
    """The bytes of a text, which may not be valid UTF-8."""


def salvaged(path: Path, tables: Collection[str]) -> Path:
    """Replace a damaged file by a new one with the readable rows of these tables -> where the damaged one is now. The
    old file stays in place until the new one is whole."""
    new, aside = path.with_name(f"{path.name}.recovering"), path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    _remove(new)
    target, source = sqlite3.connect(new, isolation_level=None), sqlite3.connect(path)
    with contextlib.closing(target), contextlib.closing(source), contextlib.suppress(sqlite3.DatabaseError):
        source.text_factory = _Text
        definitions = source.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        for name, definition in definitions:
            if name.decode() in tables:
                target.execute(definition.decode())
                _copy(source, target, name.decode())
    os.link(path, aside)
    for suffix in ("-wal", "-shm"):  # before the new file comes: it must not take them for its own
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    os.replace(new, path)
    return aside


def _copy(source: sqlite3.Connection, target: sqlite3.Connection, table: str) -> None:
    target.execute("BEGIN")
    for row in _rows(source, table):
        places = ", ".join("CAST(? AS TEXT)" if isinstance(value, _Text) else "?" for value in row)
        with contextlib.suppress(sqlite3.DatabaseError):
            target.execute(f"INSERT INTO {table} VALUES ({places})", row)
    target.execute("COMMIT")


def _rows(source: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """All readable rows of a table, in the order of their numbers, since indexes may be damaged. Damaged pages are
    skipped."""
    at, failures = 0, 0
    while at < ROWID_MAX:
        try:
            found = source.execute(f"SELECT rowid, * FROM {table} WHERE rowid > ? ORDER BY rowid", (at,))
            for rowid, *row in found:
                at, failures = rowid, 0
                yield tuple(row)
            return
        except sqlite3.DatabaseError:
            failures += 1
            at += 1 << max(0, failures - STEPS)


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
