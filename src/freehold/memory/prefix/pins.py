"""Prefixes pinned by operators, within a budget, and unpinned before a request would starve."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from freehold.contract.arrays import Int32
from freehold.memory.prefix.keyed_queue import KeyedQueue
from freehold.memory.prefix.node import Match, Node, PinKind
from freehold.memory.prefix.tree import PrefixTree


@dataclass(frozen=True)
class PinnedPrefix:
    """The first `tokens` tokens of a requested prefix, kept at `node` until `expires` (seconds of the scheduler's
    clock; None is never)."""

    name: str
    salt: str
    tokens: int
    node: Node
    expires: float | None


PINS_MAX = 1024


class PinRefused(ValueError):
    """The pin is impossible. Nothing was changed."""


class PinTable:
    """Operators' pins by name, oldest first: at most PINS_MAX. Together they hold at most `limit` pages of each
    group."""

    def __init__(self, tree: PrefixTree, limit: int):
        self._tree = tree
        self._pins: OrderedDict[str, PinnedPrefix] = OrderedDict()
        self._expiries: KeyedQueue[str] = KeyedQueue(self._expiry)
        self.limit = limit
        self.given_up_count = 0

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[PinnedPrefix]:
        return iter(self._pins.values())

    @property
    def page_count(self) -> int:
        """Pages of each group that pins hold; a shared prefix counts once."""
        return self._tree.holds.kept_page_count

    def pin(self, name: str, match: Match, tokens: Int32, expires: float | None) -> PinnedPrefix | None:
        """Pin as much of a matched prefix of `tokens` [n] as the budget allows; return None if that is nothing. Raise
        PinRefused if the name is in use, there are too many pins, or `expires` is not finite."""
        if name in self._pins:
            raise PinRefused(f"there is a pin '{name}' already")
        if len(self._pins) >= PINS_MAX:
            raise PinRefused(f"there are {PINS_MAX} pins already, the limit: remove some")
        if expires is not None and not math.isfinite(expires):
            raise PinRefused(f"the time at which a pin expires must be a number, not {expires}")
        match = self._within_budget(match, tokens)
        if match.length == 0:
            return None
        node = self._tree.holds.pin(match, PinKind.OPERATOR)
        for bounded in self._tree.bounded:
            bounded.borrow(bounded.needed_at(node, node.end))
        pin = self._pins[name] = PinnedPrefix(name, match.namespace.salt, match.length, node, expires)
        self._expiries.put(name)
        return pin

    def _expiry(self, name: str) -> float | None:
        return self._pins[name].expires if name in self._pins else None

    def _within_budget(self, match: Match, tokens: Int32) -> Match:
        """Return the longest part of the match within the budget."""
        left = self.limit - self.page_count
        if match.node is None:
            return match
        end = 0
        for node in self._tree.path(match.node):
            stop = min(node.end, match.length)
            if not node.kept:
                pages = min((stop - node.start) // self._tree.page_size, left)
                left -= pages
                stop = node.start + pages * self._tree.page_size
            end = stop
            if stop < node.end:
                break
        return self._tree.match(match.namespace, tokens, end)

    def unpin(self, name: str) -> bool:
        """Drop the pin. Return whether there was one."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        self._expiries.forget(name)
        for bounded in self._tree.bounded:
            bounded.give_back(bounded.needed_at(pin.node, pin.node.end), 0)
        self._tree.holds.unpin(pin.node, PinKind.OPERATOR, fence=0)
        return True

    def expire(self, now: float) -> None:
        """Drop expired pins. Examines no others."""
        while (name := self._expiries.due(now)) is not None:
            self.unpin(name)

    def give_up(self) -> None:
        """Drop all pins, because a request could not continue otherwise."""
        for name in list(self._pins):
            self.given_up_count += 1
            self.unpin(name)
