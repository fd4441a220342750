"""The oracle of eviction: finds the next victim by examining all candidates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from freehold.contract.arrays import Int64
from freehold.memory import Memory
from freehold.memory.prefix.bounded import BoundedPages
from freehold.memory.prefix.eviction import POLICIES
from freehold.memory.prefix.node import Node

# The order in which a bounded group gives pages. Each stage says whether it takes only pages outside the lookback of
# the node's end; up to which level of nodes; and whether a step in flight may read the pages.
STAGES = ((True, 100, False), (False, 0, False), (True, 100, True), (False, 0, True), (False, 100, True))

# The order of leaves of one level. The keys of other policies are not checked.
KEYS: dict[str, Callable[[Node], tuple[int, ...]]] = {
    "lru": lambda node: (node.last_used,),
    "lfu": lambda node: (node.hits, node.last_used),
    "fifo": lambda node: (node.created,),
    "priority": lambda node: (node.priority, node.last_used),
}


class WrongVictim(AssertionError):
    """A page or a leaf was evicted before one that should go first."""


class Victims:
    """Implements `Watcher`. Compares each evicted leaf, and each evicted page of a bounded group, with all others. The
    worth of a prefix under the policy `reuse` comes from the statistics of the tree."""

    def __init__(self, memory: Memory):
        self._tree = memory.tree
        self._size = memory.page_size
        self._policy = memory.shape.eviction_policy
        quota = memory.shape.tenant_quota
        self._quota = None if quota is None else memory.shape.pages(quota)
        self._evicting: BoundedPages | None = None
        self._target = 0  # pages left in the group after the eviction
        self._stage = 0
        peek = self._tree.candidates.peek

        def next_one() -> Node | None:
            worst = self._worst()
            node = peek()
            if node not in worst and (worst or node is not None):
                raise WrongVictim(f"{node!r} goes by '{self._policy}' instead of {worst}")
            return node

        self._tree.candidates.peek = next_one
        for bounded in self._tree.bounded:
            self._watch(bounded)
        self._tree.watchers.append(self)

    # -- leaves -----------------------------------------------------------------------------------------

    def _worst(self) -> list[Node]:
        """Return the leaves any of which may go next."""
        tenants: defaultdict[str, list[Node]] = defaultdict(list)
        pages: Counter[str] = Counter()
        for node in self._tree.nodes():
            salt = "" if self._quota is None else node.namespace.salt
            pages[salt] += node.page_count
            if node.parent is not None and not node.children and not node.holds:
                tenants[salt].append(node)
        over = [salt for salt in tenants if self._quota is not None and pages[salt] > self._quota]
        most = max((pages[salt] for salt in over), default=0)
        firsts = [self._first(tenants[salt]) for salt in tenants if not over or (salt in over and pages[salt] == most)]
        if over or self._policy == "reuse":  # keys of tenants are not updated when worth changes with age
            return firsts
        return sorted(firsts, key=self._key)[:1]

    def _first(self, leaves: list[Node]) -> Node:
        """Return the leaf that a tenant must give first."""
        if self._policy != "reuse":
            return min(leaves, key=self._key)
        classes: defaultdict[int, list[Node]] = defaultdict(list)
        for leaf in leaves:
            classes[min(leaf.hits, 3)].append(leaf)
        worth, tick = self._tree.history.reuse.worth, self._tree.tick
        heads = [min(nodes, key=lambda node: (node.level, node.last_used)) for nodes in classes.values()]
        return min(heads, key=lambda node: (node.level, worth(node.hits, tick - node.last_used), node.last_used))

    def _key(self, node: Node) -> tuple[int, ...]:
        return (node.level, *(KEYS.get(self._policy) or POLICIES[self._policy])(node))

    # -- pages of bounded groups ------------------------------------------------------------------------

    def _watch(self, bounded: BoundedPages) -> None:
        evict = bounded.evict

        def evicted(count: int) -> int:
            self._evicting, self._target, self._stage = bounded, bounded.page_count - count, 0
            try:
                return evict(count)
            finally:
                self._evicting = None

        bounded.evict = evicted

    def vanished(self, node: Node, group: int, columns: Int64) -> None:
        bounded = self._evicting
        if bounded is None or group != bounded.number or len(columns) == 0:
            return
        while not (could := list(self._could_go(bounded, *STAGES[self._stage]))):
            self._stage += 1
            if self._stage == len(STAGES):
                raise WrongVictim(f"{node!r} has nothing of group {group} to give")
        first, wanted = min(could, key=lambda one: self._bounded_key(one[0], STAGES[self._stage][0]))
        if STAGES[self._stage][0]:
            # A watcher is not told of old weights' pages, so the page count says how many are left to evict. It
            # excludes `columns` already.
            wanted = wanted[: bounded.page_count + len(columns) - self._target]
        if node is not first or not np.array_equal(columns, wanted):
            raise WrongVictim(f"group {group}: columns {columns} of {node!r} go instead of {wanted} of {first!r}")

    def _could_go(
        self, bounded: BoundedPages, is_inner: bool, level: int, may_be_read: bool
    ) -> Iterator[tuple[Node, Int64]]:
        lookback = bounded.group.lookback or 0
        for node in self._tree.nodes():
            pages = node.pages[bounded.number]
            unread = ((pages != 0) & (bounded.readers[pages] == 0)).nonzero()[0]
            in_use = bounded.in_use(node, unread)
            if is_inner:  # all its positions come before the lookback of the node's end
                ends = node.start + (unread + 1) * self._size
                unread = unread[(ends <= node.end - lookback) & (may_be_read | ~in_use)]
            elif node.level > level or (in_use.any() and not may_be_read):
                continue
            if len(unread):
                yield node, unread

    def _bounded_key(self, node: Node, is_inner: bool) -> tuple[int, ...]:
        return (0 if is_inner else node.level, node.last_used, -node.end)

    # -- what does not matter ---------------------------------------------------------------------------

    def appeared(self, node: Node, group: int, columns: Int64) -> None:
        """Do nothing: it may go later."""

    def cleared(self) -> None:
        """Do nothing: pages of old weights need no check."""

    def left(self, node: Node) -> None:
        """Do nothing: its pages have gone before."""

    def cut(self, upper: Node, node: Node) -> None:
        """Do nothing: both may go later."""

    def used(self, node: Node) -> None:
        """Do nothing: it may go later."""
