"""Counts what an object keeps alive: entries and bytes of every container reachable from it."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import numpy as np

CONTAINERS = (dict, list, set, tuple, deque)


class Census:
    """`entries` and `bytes` by "Class.attribute", summed over all objects of the class; `objects` by class."""

    def __init__(self, root: Any):
        self.entries: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.objects: Counter[str] = Counter()
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no id is reused
        self._todo: list[Any] = [root]
        while self._todo:
            self._visit(self._todo.pop())

    def _visit(self, thing: Any) -> None:
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        self._kept.append(thing)
        kind = type(thing).__name__
        self.objects[kind] += 1
        for name, value in _attributes(thing):
            self._count(f"{kind}.{name}", value)

    def _count(self, where: str, value: Any) -> None:
        if _is_ours(value):
            self._todo.append(value)
        elif isinstance(value, np.ndarray):
            whole = value if value.base is None else value.base
            if id(whole) not in self._seen:
                self._seen.add(id(whole))
                self._kept.append(whole)
                self.bytes[where] += getattr(whole, "nbytes", 0)
        elif isinstance(value, CONTAINERS):
            if id(value) in self._seen:
                return
            self._seen.add(id(value))
            self._kept.append(value)
            self.bytes[where] += sys.getsizeof(value)
            if not isinstance(value, tuple):
                self.entries[where] += len(value)
            for one in _members(value):
                self._count(where, one)
        elif isinstance(value, (bytes, str)):
            self.bytes[where] += sys.getsizeof(value)
        elif callable(value):
            for cell in getattr(value, "__closure__", None) or ():
                self._count(where, cell.cell_contents)


def _is_ours(value: Any) -> bool:
    """Return whether it is part of scheduler or memory, not of the simulation around them."""
    module = type(value).__module__
    is_ours = module.startswith("freehold.") and not module.startswith("freehold.simulation")
    return is_ours and not isinstance(value, (int, str, tuple))


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(thing, name):
                yield name, getattr(thing, name)


def _members(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    else:
        yield from value
