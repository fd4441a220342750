"""Recovers readable rows of a damaged SQLite file."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

ROWID_MAX = (1 << 63) - 1
STEPS = 1000  # rows skipped one by one, more than a page holds; then steps double


class _Text(bytes):
    """A text's bytes, which may be invalid UTF-8."""


def salvaged(path: Path, prepare: Callable[[sqlite3.Connection], None], tables: Collection[str]) -> Path:
    """Replace a damaged file by a new one, in which `prepare` creates tables, with the readable rows of `tables`.
    Return where the damaged file is now. It stays in place until the new one is complete. Raises sqlite3.Error and
    OSError if writing fails."""
    new, aside = path.with_name(f"{path.name}.recovering"), path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    _remove(new)
    target, source = sqlite3.connect(new, isolation_level=None), sqlite3.connect(path)
    with contextlib.closing(target), contextlib.closing(source):
        source.text_factory = _Text
        prepare(target)
        for name, definition in _definitions(source):
            if name in tables and _has_table(target, source, name, definition):
                _copy(source, target, name)
    _link(path, aside)
    for suffix in ("-wal", "-shm"):  # before the new file arrives, which must not use them
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    os.replace(new, path)
    return aside


def _definitions(source: sqlite3.Connection) -> list[tuple[str, str]]:
    """Return table names and their definitions."""
    try:
        found = source.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
    except (sqlite3.DatabaseError, UnicodeDecodeError):
        return []
    return [(name.decode(errors="replace"), definition.decode(errors="replace")) for name, definition in found]


def _has_table(target: sqlite3.Connection, source: sqlite3.Connection, name: str, definition: str) -> bool:
    """Return whether the target has the table with the source's columns. A table of an earlier version is created."""
    if _width(target, name) != _width(source, name):
        try:
            target.execute(f"DROP TABLE IF EXISTS {name}")
            target.execute(definition)
        except sqlite3.OperationalError:  # the definition is damaged
            return False
    return True


def _width(connection: sqlite3.Connection, table: str) -> int:
    return len(connection.execute(f"PRAGMA table_info({table})").fetchall())


def _link(path: Path, aside: Path) -> None:
    """Give a file a second name, or a copy if the file system has no links."""
    try:
        os.link(path, aside)
    except OSError:
        shutil.copy2(path, aside)


def _copy(source: sqlite3.Connection, target: sqlite3.Connection, table: str) -> None:
    target.execute("BEGIN")
    for row in _rows(source, table):
        places = ", ".join("CAST(? AS TEXT)" if isinstance(value, _Text) else "?" for value in row)
        with contextlib.suppress(sqlite3.IntegrityError):  # of an invalid row
            target.execute(f"INSERT INTO {table} VALUES ({places})", row)
    target.execute("COMMIT")


def _rows(source: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """Yield a table's readable rows in rowid order, since indexes may be damaged. Damaged pages are skipped."""
    at, failures = 0, 0
    while at < ROWID_MAX:
        try:
            found = source.execute(f"SELECT rowid, * FROM {table} WHERE rowid > ? ORDER BY rowid", (at,))
            for rowid, *row in found:
                at, failures = rowid, 0
                yield tuple(row)
            return
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            failures += 1
            at += 1 << max(0, failures - STEPS)


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
