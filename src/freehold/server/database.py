"""A SQLite file for persistent data, on its own thread, so that no request waits for another's disk access."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Protocol, TypeVar

from freehold.server.salvage import salvaged

NORMAL, FULL = "normal", "full"
SYNCS = (NORMAL, FULL)
# Primary codes of faults outside the file, and codes of unreadable disks.
ELSEWHERE = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY,
}  # fmt: skip
UNREADABLE = {sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ}
Found = TypeVar("Found")


class Tables(Protocol):
    """One store's tables in the file. An entry may span several of them."""

    noun: str  # plural name of entries
    names: tuple[str, ...]  # including tables of earlier versions

    def prepare(self, connection: sqlite3.Connection) -> None:
        """Create the tables, or migrate those of an earlier version."""

    def damaged(self, connection: sqlite3.Connection) -> list[bytes | None]:
        """Return raw ids of unreadable entries. The ids may be damaged too."""
        ...

    def prune(self, connection: sqlite3.Connection) -> None:
        """Repair entries where possible, and delete the unreadable rest."""
        ...

    def entries(self, connection: sqlite3.Connection) -> int: ...


class Database:
    """Runs work on one connection, in a thread, in submission order. Only one server may use a file."""

    def __init__(self, connection: sqlite3.Connection, lock: IO[str] | None = None):
        self._connection = connection
        self._lock = lock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite")

    @property
    def is_file(self) -> bool:
        return self._lock is not None

    def submit(self, work: Callable[[sqlite3.Connection], Found]) -> Future[Found]:
        return self._thread.submit(work, self._connection)

    async def run(self, work: Callable[[sqlite3.Connection], Found]) -> Found:
        """Run work and wait for it. It completes even if the caller is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self.submit(work)))

    def close(self) -> None:
        """Close the file after all submitted work. Idempotent."""
        self._thread.shutdown()
        self._connection.close()
        if self._lock is not None:
            self._lock.close()


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit the enclosed work, or roll all of it back."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def open_database(path: str | None, tables: Sequence[Tables], sync: str = NORMAL, recover: bool = False) -> Database:
    """Open a file with these tables, or without a path a database in memory. With `recover` a damaged file is moved
    aside and its readable entries are kept. Raises ValueError if the file can't be used."""
    if path is None:
        return Database(_opened(":memory:", tables, sync))
    path = os.path.realpath(path)
    lock = _lock(path)
    try:
        return Database(_opened_or_recovered(path, tables, sync, recover), lock)
    except BaseException:
        lock.close()
        raise


def _opened_or_recovered(path: str, tables: Sequence[Tables], sync: str, recover: bool) -> sqlite3.Connection:
    """Open the database, recovering it if asked. Raises ValueError."""
    try:
        return _opened(path, tables, sync)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if not _is_damage(error):
            raise ValueError(f"session_store: {path} can't be opened: {error}") from None
        if not recover:
            raise ValueError(
                f"session_store: {path} is damaged ({error}). Start with --session-store-recover to keep what can be "
                "read"
            ) from None
    try:
        return _recovered(path, tables, sync)
    except (sqlite3.Error, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"session_store: {path} is damaged, and can't be recovered: {error}") from None


def _is_damage(error: Exception) -> bool:
    """Return whether the file itself is damaged, rather than its folder, its disk or another program at fault."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code in UNREADABLE or code & 0xFF not in ELSEWHERE


def _lock(path: str) -> IO[str]:
    """Lock the file until it is closed or the process ends. Raises ValueError."""
    try:
        file = open(f"{path}.lock", "w")  # noqa: SIM115, closing it unlocks
    except OSError as error:
        raise ValueError(f"session_store: {path} can't be opened: {error}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(f"session_store: {path} is in use by another server") from None
    return file


def _opened(path: str, tables: Sequence[Tables], sync: str, prunes: bool = False) -> sqlite3.Connection:
    """Open the database. Raises sqlite3.DatabaseError for unreadable entries, unless it `prunes` them."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.create_function("is_utf8", 1, _is_utf8, deterministic=True)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={sync}")
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        for store in tables:
            with transaction(connection):
                store.prepare(connection)
                if prunes:
                    store.prune(connection)
            if damaged := store.damaged(connection):
                name = (damaged[0] or b"").decode(errors="replace")
                raise sqlite3.DatabaseError(f"{len(damaged)} {store.noun} can't be read, such as '{name}'")
    except BaseException:
        connection.close()
        raise
    return connection


def _recovered(path: str, tables: Sequence[Tables], sync: str) -> sqlite3.Connection:
    """Move a damaged file aside and open a new one with its readable entries."""

    def prepare(connection: sqlite3.Connection) -> None:
        for store in tables:
            store.prepare(connection)

    aside = salvaged(Path(path), prepare, [name for store in tables for name in store.names])
    connection = _opened(path, tables, sync, prunes=True)
    kept = " and ".join(f"{store.entries(connection)} {store.noun}" for store in tables)
    print(f"freehold: {path} was damaged. {kept} could be read, the damaged file is {aside}", file=sys.stderr)
    return connection


def _is_utf8(raw: bytes) -> bool:
    """Return whether the bytes are valid UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
