"""Converts SQLite's errors to ours."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

from freehold.contract.errors import StoreFailed


@contextlib.contextmanager
def failing_as(message: str) -> Iterator[None]:
    """Raise StoreFailed with the message and SQLite's."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreFailed(f"{message}: {error}") from error
