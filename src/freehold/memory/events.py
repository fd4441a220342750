"""Events for outside followers: what enters and leaves the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from freehold.contract.arrays import Int32, Int64
from freehold.contract.prefix_keys import KeyChain
from freehold.memory.prefix.node import Node


class Medium(StrEnum):
    """Where pages are, in the terms of vLLM's events."""

    DEVICE = "GPU"
    HOST = "CPU"


@dataclass(frozen=True)
class Stored:
    """Pages with these keys can now be found. They follow the page with the key `parent` (None: they begin a prefix)
    and have `tokens` int32 [n]."""

    keys: Sequence[bytes]
    medium: Medium
    parent: bytes | None
    tokens: Int32


@dataclass(frozen=True)
class Removed:
    """Pages with these keys can no longer be found."""

    keys: Sequence[bytes]
    medium: Medium


@dataclass(frozen=True)
class Cleared:
    """Nothing can be found any more: the weights have changed."""


CacheEvent = Stored | Removed | Cleared


_Origin = tuple[bytes | None, Int32]  # the key before a page, and its tokens


class EventLog:
    """Implements `Watcher`. Follows the first cache group only. Of a full group every column of a prefix has a page; if
    no group is full, only the columns needed to resume.

    When the weights change everything counts as gone, including what a paused request still holds.
    """

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._events: list[CacheEvent] = []
        self._told: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        # Pages being copied to the host, and the number of transfers bringing each.
        self._coming: dict[bytes, tuple[_Origin, int]] = {}

    def take(self) -> list[CacheEvent]:
        """Return and clear the events since the last call, in order."""
        taken, self._events = self._events, []
        return taken

    def appeared(self, node: Node, group: int, columns: Int64) -> None:
        if group != 0:
            return
        for run in np.split(columns, np.flatnonzero(np.diff(columns) != 1) + 1):
            if len(run):
                self._stored(node, int(run[0]), int(run[-1]) + 1)

    def _stored(self, node: Node, first: int, end: int) -> None:
        size = self._page_size
        tokens = node.tokens[first * size : end * size]
        self._tell(Stored(node.keys[first:end], Medium.DEVICE, _key_before(node, first), tokens))

    def vanished(self, node: Node, group: int, columns: Int64) -> None:
        if group == 0:
            self._forget(node.keys_at(columns), Medium.DEVICE)

    def used(self, node: Node) -> None:
        """Do nothing: no page comes or goes."""

    def left(self, node: Node) -> None:
        """Do nothing: its pages were reported gone before."""

    def cut(self, upper: Node, node: Node) -> None:
        """Do nothing: no page comes or goes."""

    def copied(self, node: Node, columns: Int64) -> None:
        """Note that pages of a node are being copied to the host."""
        size = self._page_size
        for column in map(int, columns):
            origin = _key_before(node, column), node.tokens[column * size : (column + 1) * size]
            self._comes(node.keys[column], origin)

    def fetched(self, keys: KeyChain, columns: Int64) -> None:
        """Note that pages of a sequence are being fetched to the host."""
        size = self._page_size
        for column in map(int, columns):
            before = keys[column - 1] if column else None
            self._comes(keys[column], (before, keys.tokens[column * size : (column + 1) * size]))

    def _comes(self, key: bytes, origin: _Origin) -> None:
        _, count = self._coming.get(key, (origin, 0))
        self._coming[key] = origin, count + 1

    def host_added(self, keys: Sequence[bytes]) -> None:
        """Report pages that reached the host; consecutive ones share an event."""
        begin = 0
        origins = [self._coming[key][0] for key in keys]
        for at in range(1, len(keys) + 1):
            if at == len(keys) or origins[at][0] != keys[at - 1]:
                tokens = np.concatenate([part for _, part in origins[begin:at]])
                self._tell(Stored(keys[begin:at], Medium.HOST, origins[begin][0], tokens))
                begin = at

    def arrived(self, keys: Sequence[bytes]) -> None:
        """Note that a transfer of these keys has ended, successfully or not."""
        for key in keys:
            origin, count = self._coming.pop(key)
            if count > 1:
                self._coming[key] = origin, count - 1

    def host_removed(self, keys: Sequence[bytes]) -> None:
        self._forget(keys, Medium.HOST)

    def cleared(self) -> None:
        """Report that the weights have changed."""
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


def _key_before(node: Node, column: int) -> bytes | None:
    """Return the key before a column, or None at the beginning of a prefix."""
    if column:
        return node.keys[column - 1]
    assert node.parent is not None
    return node.parent.keys[-1] if node.parent.parent is not None else None
