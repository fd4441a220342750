"""Where the pages of a sequence are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freehold.arrays import Bool, Int64
from freehold.memory.group import CacheGroup, longest_boundary
from freehold.memory.prefix.node import Match
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tiers.host import HostTier
from freehold.prefix_keys import KeyChain

Present = list[Bool]  # for each group, bool [columns]


class Reach:
    """Looks a sequence up on device and host, column by column. Changes nothing."""

    def __init__(self, groups: Sequence[CacheGroup], tree: PrefixTree, host: HostTier):
        self._groups = groups
        self._tree = tree
        self._host = host
        self.full = [number for number, group in enumerate(groups) if not group.is_bounded]

    def on_device(self, match: Match, columns: int) -> Present:
        """Where the device has a page, of what the match knows."""
        present: Present = []
        for group in range(len(self._groups)):
            found: Bool = np.zeros(columns, np.bool_)
            if match.last is not None:
                pages = self._tree.pages_to(match.last, match.known, group)[:columns]
                found[: len(pages)] = pages != 0
            present.append(found)
        return present

    def on_host(self, keys: KeyChain, on_device: Present) -> Present:
        """Which columns that the device lacks the host has."""
        present: Present = []
        for pages, known in zip(self._host.pages, on_device, strict=True):
            found: Bool = np.zeros(len(known), np.bool_)
            for column in np.flatnonzero(~known).tolist():
                found[column] = keys[column] in pages
            present.append(found)
        return present

    def column_count(self, match: Match, keys: KeyChain, limit: int) -> int:
        """How many columns of the first `limit` tokens device and host can have: behind the first that a full group
        lacks nothing counts."""
        size = self._tree.page_size
        most = min(limit // size, len(keys))
        if not self.full:
            return most
        columns = min(match.known // size, most)
        while columns < most and all(keys[columns] in self._host.pages[group] for group in self.full):
            columns += 1
        return columns

    def boundary(self, *present: Present) -> int:
        """The most tokens from which every group can go on, with pages that are here or there."""
        either = [np.logical_or.reduce(parts) for parts in zip(*present, strict=True)]
        return longest_boundary(self._groups, self._tree.page_size, either) if len(either[0]) else 0

    def needed(self, boundary: int, present: Present) -> list[Int64]:
        """The columns of each group, among those present, that it needs to go on from a boundary."""
        size, wanted = self._tree.page_size, list[Int64]()
        for group, found in zip(self._groups, present, strict=True):
            first = group.first_column(boundary, size)
            wanted.append(first + found[first : boundary // size].nonzero()[0])
        return wanted
