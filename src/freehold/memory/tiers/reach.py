"""Which tiers have the pages of a sequence."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from freehold.contract.arrays import Bool, Int64
from freehold.contract.prefix_keys import KeyChain
from freehold.memory.group import CacheGroup, longest_boundary
from freehold.memory.prefix.node import Match
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tiers.host import HostTier

COLUMNS_AT_ONCE = 512  # in a slice

Present = list[Bool]  # for each group, bool [columns]


class Reach:
    """Looks a sequence up on device and host, column by column. Changes nothing."""

    def __init__(self, groups: Sequence[CacheGroup], tree: PrefixTree, host: HostTier):
        self._groups = groups
        self._tree = tree
        self._host = host
        self.full = [number for number, group in enumerate(groups) if not group.is_bounded]

    def on_device(self, match: Match, columns: int) -> Present:
        """Return where the device has a page: bool [columns] of each group. The match knows at most `columns` pages."""
        present: Present = []
        for group in range(len(self._groups)):
            found: Bool = np.zeros(columns, np.bool_)
            if match.last is not None:
                pages = self._tree.pages_to(match.last, match.known, group)
                found[: len(pages)] = pages != 0
            present.append(found)
        return present

    def on_host(self, keys: KeyChain, on_device: Present, first: int = 0) -> Present:
        """Return the columns that the host has and the device lacks. `on_device` begins with column `first`."""
        present: Present = []
        for pages, known in zip(self._host.pages, on_device, strict=True):
            found: Bool = np.zeros(len(known), np.bool_)
            lacking = np.flatnonzero(~known)
            found[lacking] = pages.has(keys.at((first + lacking).tolist()))
            present.append(found)
        return present

    def hash_some(self, match: Match, keys: KeyChain, limit: int) -> bool:
        """Make keys for `looking`, at most COLUMNS_AT_ONCE. Return whether more are lacking."""
        if self.lacks_keys(match, keys, limit):
            _ = keys[min(keys.made + COLUMNS_AT_ONCE, limit // self._tree.page_size, len(keys)) - 1]
        return self.lacks_keys(match, keys, limit)

    def lacks_keys(self, match: Match, keys: KeyChain, limit: int) -> bool:
        """Return whether `looking` needs more keys. Nothing behind the first column that a full group lacks counts, so
        the keys suffice if the newest one is nowhere."""
        known, most = match.known // self._tree.page_size, min(limit // self._tree.page_size, len(keys))
        is_known = known >= most and len(self.full) == len(self._groups)
        if is_known or keys.made >= most:
            return False
        return keys.made <= known or all(keys[keys.made - 1] in self._host.pages[group] for group in self.full)

    def looking(self, match: Match, keys: KeyChain, limit: int) -> Generator[None, None, tuple[Present, Present]]:
        """Look the first `limit` tokens up, in slices. Return where the device has a page, and where only the host has
        one. Both end with the first column that a full group lacks: nothing behind it counts."""
        while self.hash_some(match, keys, limit):
            yield
        size = self._tree.page_size
        on_device = self.on_device(match, min(limit // size, len(keys)))
        on_host: Present = [np.zeros_like(one) for one in on_device]
        begin = match.known // size if len(self.full) == len(self._groups) else 0
        for first in range(begin, len(on_device[0]), COLUMNS_AT_ONCE):
            part = slice(first, first + COLUMNS_AT_ONCE)
            for host, found in zip(on_host, self.on_host(keys, [one[part] for one in on_device], first), strict=True):
                host[part] = found
            holes = [np.flatnonzero(~(on_device[group][part] | on_host[group][part])) for group in self.full]
            ends = [first + int(one[0]) for one in holes if len(one)]
            if ends:
                return [one[: min(ends)] for one in on_device], [one[: min(ends)] for one in on_host]
            yield
        return on_device, on_host

    def boundary(self, *present: Present) -> int:
        """Return the most tokens from which every group can resume, with the pages of all `present` combined."""
        either = [np.logical_or.reduce(parts) for parts in zip(*present, strict=True)]
        return longest_boundary(self._groups, self._tree.page_size, either) if len(either[0]) else 0

    def needed(self, boundary: int, present: Present) -> list[Int64]:
        """Return the columns of each group, among those present, that it needs to resume from a boundary."""
        size, wanted = self._tree.page_size, list[Int64]()
        for group, found in zip(self._groups, present, strict=True):
            first = group.first_column(boundary, size)
            wanted.append(first + found[first : boundary // size].nonzero()[0])
        return wanted
