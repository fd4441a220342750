"""What appears in the cache and what leaves it, told to those who follow from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from freehold.arrays import Int32, Int64
from freehold.memory.prefix.node import Node


class Medium(StrEnum):
    """Where pages are, in the words of vLLM's events."""

    DEVICE = "GPU"
    HOST = "CPU"


@dataclass(frozen=True)
class Stored:
    """Pages with these keys can be found now. On the device they follow the page with the key `parent` (None: they
    begin a prefix) and have `tokens` int32 [n]; the host knows keys alone."""

    keys: Sequence[bytes]
    medium: Medium
    parent: bytes | None = None
    tokens: Int32 | None = None


@dataclass(frozen=True)
class Removed:
    """They can't any more."""

    keys: Sequence[bytes]
    medium: Medium


@dataclass(frozen=True)
class Cleared:
    """Nothing is found any more: the weights have changed."""


CacheEvent = Stored | Removed | Cleared


class EventLog:
    """Implements `Watcher`. Follows one cache group, the first: of that every column of a prefix has a page, or, if no
    group is full, those from which one can go on.

    When the weights change everything counts as gone, also what a paused request still holds.
    """

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._events: list[CacheEvent] = []
        self._told: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}

    def take(self) -> list[CacheEvent]:
        """What happened since the last call, in order."""
        taken, self._events = self._events, []
        return taken

    def appeared(self, node: Node, group: int, columns: Int64) -> None:
        if group != 0:
            return
        for run in np.split(columns, np.flatnonzero(np.diff(columns) != 1) + 1):
            if len(run):
                self._stored(node, int(run[0]), int(run[-1]) + 1)

    def _stored(self, node: Node, first: int, end: int) -> None:
        assert node.parent is not None
        size, before = self._page_size, node.parent.keys[-1] if node.parent.parent is not None else None
        parent = node.keys[first - 1] if first else before
        tokens = node.tokens[first * size : end * size]
        self._tell(Stored(node.keys[first:end], Medium.DEVICE, parent, tokens))

    def vanished(self, node: Node, group: int, columns: Int64) -> None:
        if group == 0:
            self._forget(node.keys_at(columns), Medium.DEVICE)

    def used(self, node: Node) -> None:
        """Nothing comes or goes."""

    def left(self, node: Node) -> None:
        """Its pages have gone before."""

    def cut(self, upper: Node, node: Node) -> None:
        """Nothing comes or goes."""

    def host_added(self, keys: Sequence[bytes]) -> None:
        if keys:
            self._tell(Stored(keys, Medium.HOST))

    def host_removed(self, keys: Sequence[bytes]) -> None:
        self._forget(keys, Medium.HOST)

    def cleared(self) -> None:
        """Other weights compute from now on."""
        self._events.append(Cleared())
        for told in self._told.values():
            told.clear()

    def _tell(self, event: Stored) -> None:
        self._told[event.medium].update(event.keys)
        self._events.append(event)

    def _forget(self, keys: Sequence[bytes], medium: Medium) -> None:
        told = self._told[medium]
        gone = [key for key in keys if key in told]
        if gone:
            told.difference_update(gone)
            self._events.append(Removed(gone, medium))
