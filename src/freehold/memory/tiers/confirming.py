"""Asking storage whether it still has what is in use.

A store keeps longer what it is asked for: a disk gives it a second chance, Redis a new expiry. So use on any tier
counts on all. Pages that a store has lost meanwhile are stored again.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from freehold.contract.arrays import Int64
from freehold.contract.orders import Kind
from freehold.memory.prefix.node import Node
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tiers.host import HostTier
from freehold.memory.tiers.storage import Question, Storage
from freehold.memory.tiers.transfer import LATE_S

INTERVAL_S = 5.0  # at least, between the beginnings of two rounds
COLUMNS_AT_ONCE = 256  # per question
USED_MAX = 512  # prefixes in a round


class Confirming:
    """Asks in rounds for all used prefixes, one question at a time, ends before beginnings."""

    def __init__(self, tree: PrefixTree, host: HostTier):
        self._tree = tree
        self._host = host
        self._used: dict[int, Node] = {}  # the nodes from whose ends requests resumed, by serial
        self._round: dict[int, Node] = {}  # nodes to ask for, in order
        self._asked = 0  # columns of the first node
        self._question = Question(has_all=True)
        self._about: dict[int, Node] = {}  # nodes covered by the question
        self._next_at = self._late_at = 0.0

    def used(self, node: Node) -> None:
        """Note that a request resumes from the end of a node."""
        if self._host.leads_to_storage and node.parent is not None and len(self._used) < USED_MAX:
            self._used[node.serial] = node

    def left(self, node: Node) -> None:
        """Remove a node that left the tree."""
        self._used.pop(node.serial, None)
        if node is self._first:
            self._asked = 0
        self._round.pop(node.serial, None)
        self._about.pop(node.serial, None)

    def forget(self) -> None:
        """Start over: storage was removed or replaced."""
        self._used.clear()
        self._round.clear()
        self._about.clear()
        self._asked, self._question = 0, Question(has_all=True)

    def go_on(self, storage: Storage, now: float) -> Collection[Node]:
        """Ask the next question once the last one is answered or late. Called in every iteration. Return nodes of which
        storage may have lost pages."""
        if self._question.has_all is None and now < self._late_at:
            return ()
        lost = self._about.values() if self._question.has_all is False else ()
        if not self._round and self._used and now >= self._next_at:
            self._next_at = now + INTERVAL_S
            self._begin_round()
        self._question = self._ask(storage)
        self._late_at = now + LATE_S[Kind.PROBE]
        return lost

    @property
    def _first(self) -> Node | None:
        return next(iter(self._round.values()), None)

    def _begin_round(self) -> None:
        used, self._used = self._used, {}
        for last in used.values():
            node = last
            while node.parent is not None and node.serial not in self._round:
                self._round[node.serial] = node
                node = node.parent

    def _ask(self, storage: Storage) -> Question:
        """Ask about the next columns of the round that storage was given. Return the question."""
        self._about = {}
        keys: list[list[bytes]] = [[] for _ in self._host.pages]
        room = COLUMNS_AT_ONCE
        while room and (node := self._first) is not None:
            end = node.page_count - self._asked
            if end <= 0 or node.namespace.weights != self._tree.weights:
                del self._round[node.serial]
                self._asked = 0
                continue
            columns = np.arange(max(end - room, 0), end)[::-1]
            self._asked, room = self._asked + len(columns), room - len(columns)
            self._about[node.serial] = node
            for group, part in enumerate(keys):
                part += self._given(group, node, columns)
        return storage.ask(keys) if any(keys) else Question(has_all=True)

    def _given(self, group: int, node: Node, columns: Int64) -> list[bytes]:
        """Return the keys of pages in some columns of a node that storage was given."""
        pages, keys = self._host.pages[group], node.keys_at(columns[node.pages[group][columns] != 0])
        known = pages.given.known(keys, pages.pages_of(keys))
        return [key for key, is_given in zip(keys, known, strict=True) if is_given]
