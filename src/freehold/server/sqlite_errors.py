"""What goes wrong in SQLite, as an error of ours."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

from freehold.contract.errors import StoreFailed


@contextlib.contextmanager
def failing_as(message: str) -> Iterator[None]:
    """Raises StoreFailed with the message and SQLite's words."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreFailed(f"{message}: {error}") from error
