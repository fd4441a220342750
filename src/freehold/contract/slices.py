"""Work in slices: a generator that yields whenever others may have their turn, and returns what it has come to. It
yields for how many seconds it has nothing to do, or None to go on soon."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TypeVar

Value = TypeVar("Value")


def finished(work: Generator[float | None, None, Value]) -> Value:
    """Do all of it now -> its result."""
    while True:
        try:
            rest = next(work)
        except StopIteration as end:
            return end.value
        if rest is not None:
            time.sleep(rest)
