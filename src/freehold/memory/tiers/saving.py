"""Copying a sequence to the deepest tier, under any write policy."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from freehold.contract.arrays import Bool, Int64
from freehold.contract.prefix_keys import KeyChain
from freehold.memory.prefix.node import Namespace
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tiers.backup import Backup
from freehold.memory.tiers.host import HostTier
from freehold.memory.tiers.reach import Present, Reach
from freehold.memory.tiers.storage import Storage

COLUMNS_AT_ONCE = 256  # in a slice


@dataclass(frozen=True)
class Saved:
    """Tokens of a sequence on each tier: `host` alone; `storage`, as far as it was given them, None without storage;
    and `tokens`, device and host together, or storage if pages are being copied from device to host."""

    tokens: int
    host: int
    storage: int | None

    @property
    def is_whole(self) -> bool:
        """Whether the deepest tier has all of it."""
        return self.tokens == (self.host if self.storage is None else self.storage)


class Saving:
    """Copies one sequence. Nothing is copied twice: look again to see whether it has finished."""

    def __init__(
        self, tree: PrefixTree, host: HostTier, reach: Reach, backup: Backup, storage: Storage | None,
        namespace: Namespace, keys: KeyChain,
    ):  # fmt: skip
        self._tree = tree
        self._host = host
        self._reach = reach
        self._backup = backup
        self._storage = storage
        self._namespace = namespace
        self._keys = keys
        self._believed: list[Int64] = []

    def looking(self) -> Generator[None, None, Saved]:
        """Request copies of what the deeper tiers lack, in slices. Return how far they reach now."""
        match = self._tree.match(self._namespace, self._keys.tokens, len(self._keys.tokens))
        on_device, _ = yield from self._reach.looking(match, self._keys, len(self._keys.tokens))
        on_host, stored = yield from self._deeper(len(on_device[0]))
        whole = self._reach.boundary(on_device, on_host)
        if match.last is not None and self._tree.has(match.last) and self._lacks(whole, on_device, on_host, stored):
            self._backup.ask_for(match.last)
        self._believed = self._reach.needed(whole, stored)
        reached = None if self._storage is None else self._reach.boundary(stored)
        if self._storage is not None:
            yield from self._store(self._storage, on_host, stored, whole)
        return Saved(max(whole, reached or 0), self._reach.boundary(on_host), reached)

    def asking(self) -> Generator[None, None, bool]:
        """Ask storage whether it still has what it was given, as of the last `looking`. Lost pages are stored again."""
        assert self._storage is not None
        for first in range(0, len(self._keys), COLUMNS_AT_ONCE):
            part = [one[(one >= first) & (one < first + COLUMNS_AT_ONCE)] for one in self._believed]
            question = self._storage.ask([self._keys.at(one.tolist()) for one in part])
            while question.has_all is None:
                yield
            if not question.has_all:
                return False
        return True

    def _deeper(self, columns: int) -> Generator[None, None, tuple[Present, Present]]:
        """Return where the host has a page, and where storage was given it."""
        on_host: Present = [np.zeros(columns, np.bool_) for _ in self._host.pages]
        stored: Present = [np.zeros(columns, np.bool_) for _ in self._host.pages]
        for first in range(0, columns, COLUMNS_AT_ONCE):
            part = slice(first, min(first + COLUMNS_AT_ONCE, columns))
            names = self._keys.at(range(part.start, part.stop))
            for group, pages in enumerate(self._host.pages):
                on_host[group][part] = pages.has(names)
                stored[group][part] = pages.given.known(names, pages.pages_of(names))
            yield
        return on_host, stored

    def _lacks(self, boundary: int, on_device: Present, on_host: Present, stored: Present) -> bool:
        """Return whether only the device has a page needed to resume from a boundary."""
        lacking: list[Bool] = [
            there & ~(copied | given) for there, copied, given in zip(on_device, on_host, stored, strict=True)
        ]
        return any(len(part) for part in self._reach.needed(boundary, lacking))

    def _store(self, storage: Storage, on_host: Present, stored: Present, boundary: int) -> Generator[None, None, None]:
        """Store what the host has and storage was not given."""
        lacking: list[Bool] = [there & ~copied for there, copied in zip(on_host, stored, strict=True)]
        for group, needed in enumerate(self._reach.needed(boundary, lacking)):
            columns: list[int] = needed.tolist()
            for first in range(0, len(columns), COLUMNS_AT_ONCE):
                storage.enqueue(group, self._keys.at(columns[first : first + COLUMNS_AT_ONCE]))
                yield
