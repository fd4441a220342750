"""Asking storage whether it still has what is in use.

A store keeps longer what it is asked for (a second chance on a disk, an expiry in Redis), and what it has lost
meanwhile it is given again. So use on any tier is use on all, and that something is stored is not believed for ever.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from freehold.memory.prefix.node import Node
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tiers.host import HostTier
from freehold.memory.tiers.storage import Question, Storage
from freehold.memory.tiers.transfer import LATE_S
from freehold.mover import Kind

INTERVAL_S = 5.0  # from the beginning of one round to that of the next, at least
COLUMNS_AT_ONCE = 256  # of a question
USED_MAX = 4096  # prefixes in a round


class Confirming:
    """Goes round all prefixes that were used, one question at a time, ends before beginnings."""

    def __init__(self, tree: PrefixTree, host: HostTier):
        self._tree = tree
        self._host = host
        self._used: dict[int, Node] = {}  # the nodes at whose ends requests went on, by serial
        self._round: Iterator[tuple[Node, Question]] = iter(())
        self._node: Node | None = None  # that the last question was about
        self._question = Question(has_all=True)
        self._next_at = self._late_at = 0.0

    def used(self, node: Node) -> None:
        """A request goes on from the end of a node."""
        if self._host.leads_to_storage and len(self._used) < USED_MAX:
            self._used[node.serial] = node

    def left(self, node: Node) -> None:
        """A node is no longer in the tree."""
        self._used.pop(node.serial, None)

    def go_on(self, storage: Storage, now: float) -> Node | None:
        """Ask the next question once the one before is answered, or late. Called in every iteration -> a node of which
        storage has lost something."""
        if self._question.has_all is None and now < self._late_at:
            return None
        lost = self._node if self._question.has_all is False else None
        self._question = Question(has_all=True)
        following = next(self._round, None)
        if following is None and self._used and now >= self._next_at:
            used, self._used = self._used, {}
            self._next_at, self._round = now + INTERVAL_S, self._asking(storage, used)
            following = next(self._round, None)
        if following is not None:
            self._node, self._question = following
            self._late_at = now + LATE_S[Kind.PROBE]
        return lost

    def forget(self) -> None:
        """There is no storage any more, or another."""
        self._used.clear()
        self._round, self._node, self._question = iter(()), None, Question(has_all=True)

    def _asking(self, storage: Storage, used: dict[int, Node]) -> Iterator[tuple[Node, Question]]:
        done: set[int] = set()
        for last in used.values():
            node = last
            while node.parent is not None and node.serial not in done:
                done.add(node.serial)
                parent = node.parent
                if node.namespace.weights == self._tree.weights:
                    yield from self._asking_of(storage, node)
                node = parent

    def _asking_of(self, storage: Storage, node: Node) -> Iterator[tuple[Node, Question]]:
        for end in range(node.page_count, 0, -COLUMNS_AT_ONCE):
            columns = np.arange(max(end - COLUMNS_AT_ONCE, 0), min(end, node.page_count))[::-1]
            keys = [self._given(group, node.keys_at(columns)) for group in range(len(self._host.pages))]
            if any(keys):
                yield node, storage.ask(keys)

    def _given(self, group: int, keys: list[bytes]) -> list[bytes]:
        """Those that storage was given."""
        pages = self._host.pages[group]
        known = pages.given.stored[pages.pages_of(keys)] | pages.given.of_device(keys)
        return [key for key, is_given in zip(keys, known, strict=True) if is_given]
