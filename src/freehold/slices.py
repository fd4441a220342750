"""Work in slices: a generator that yields whenever others may have their turn, and returns what it has come to."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

Value = TypeVar("Value")


def finished(work: Generator[Any, None, Value]) -> Value:
    """Do all of it now -> its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
