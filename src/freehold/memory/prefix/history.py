"""A bounded record of evictions from the prefix tree, and the ages of pages at their hits and evictions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freehold.contract.arrays import Int32
from freehold.memory.prefix.keyed_queue import KeyedQueue
from freehold.memory.prefix.reuse import ReuseStatistics

if TYPE_CHECKING:
    from freehold.memory.prefix.node import Ghost, Node

AGE_BUCKETS = 24  # bucket b counts ages below 2**b steps


_Where = tuple[Hashable, bytes]


@dataclass(eq=False)
class Eviction:
    """One eviction: the step in which it happened, its cause, the number of pages, and the steps since their last use.

    The pages belonged to the node with place `place`. They had `hits` hits, and were last used at tick `last_used` of
    the tree. `ReuseStatistics` has counted the first `waited` ticks of waiting since then, and counts again at tick
    `counted_at`."""

    step: int
    cause: str
    page_count: int
    idle_steps: int
    place: Hashable
    hits: int
    last_used: int
    waited: int
    counted_at: int = 0

    def __str__(self) -> str:
        return f"evicted at step {self.step} by {self.cause}, {self.idle_steps} steps after its last use"


class PrefixHistory:
    """The newest `limit` evictions, indexed by the prefix before them (`Node.place`) and the tokens of their first
    page.

    A lookup answers whether more of a prefix was once cached. Pages recomputed after their eviction also count for
    `ReuseStatistics`: they show how long pages wait for their next use.
    """

    def __init__(self, page_size: int, limit: int = 4096):
        self.ages = PageAges()
        self.reuse = ReuseStatistics()
        self._page_size = page_size
        self.limit = limit
        self._evictions: OrderedDict[_Where, Eviction] = OrderedDict()
        self._due: KeyedQueue[Eviction] = KeyedQueue(lambda eviction: eviction.counted_at)

    def find(self, place: Hashable, key: bytes) -> Eviction | None:
        return self._evictions.get((place, key))

    def hit(self, node: Node, step: int, tick: int) -> None:
        """Record a use of a node, before its `last_used` changes."""
        self.ages.hit[PageAges.bucket(step - node.used_at)] += node.page_count
        self.reuse.wait(node.hits, 0, tick - node.last_used, node.page_count, True)

    def evicted(self, node: Node, gone: int, step: int, tick: int, cause: str) -> None:
        """Record the eviction of the last `gone` pages of a node, before they are removed."""
        idle, keep = step - node.used_at, node.page_count - gone
        self.ages.evicted[PageAges.bucket(idle)] += gone
        place = node.place if keep or node.parent is None else node.parent.place
        where = place, self._key(node.tokens, keep * self._page_size)
        eviction = Eviction(step, cause, gone, idle, node.place, node.hits, node.last_used, 0)
        self._pop(where)
        self._evictions[where] = eviction
        self._account(eviction, tick)
        while (due := self._due.due(tick)) is not None:
            self._account(due, tick)
        if len(self._evictions) > self.limit:
            oldest = self._pop(next(iter(self._evictions)))
            assert oldest is not None
            self._wait(oldest, tick, False)

    def _pop(self, where: _Where) -> Eviction | None:
        """Forget an eviction, if there is one."""
        eviction = self._evictions.pop(where, None)
        if eviction is not None:
            self._due.forget(eviction)
        return eviction

    def _account(self, eviction: Eviction, tick: int) -> None:
        """Count the time an eviction has waited so far, now and again at twice that age: not being reused is evidence,
        too."""
        self._wait(eviction, tick, False)
        eviction.counted_at = tick + max(eviction.waited, 1)
        self._due.put(eviction)

    def _wait(self, eviction: Eviction, tick: int, reused: bool) -> None:
        age = tick - eviction.last_used
        self.reuse.wait(eviction.hits, eviction.waited, age, eviction.page_count, reused)
        eviction.waited = age

    def returned(self, node: Node, after: tuple[Ghost | None, ...], tokens: Int32, tick: int) -> None:
        """Record that `tokens` [n], ending in `node`, were published again. `after` are the ghosts of the places where
        they were attached. The evictions of their pages end as reuses, which also count as hits of all nodes before."""
        node.ghost = None
        for place, at in (ghost for ghost in after if ghost is not None):
            known = at > 0
            while (found := self._pop((place, self._key(tokens, at)))) is not None:
                self._wait(found, tick, True)
                self._count_hits(node, found.hits + 1)
                place, at, known = found.place, at + found.page_count * self._page_size, True
            if known:
                node.ghost = place, max(at - len(tokens), 0)
                return

    def _count_hits(self, node: Node, hits: int) -> None:
        above: Node | None = node
        while above is not None and above.hits < hits:
            above.hits = hits
            above = above.parent

    def _key(self, tokens: Int32, at: int) -> bytes:
        return tokens[at : at + self._page_size].tobytes()


class PageAges:
    """Histograms of pages by steps since their last use: at hits and at evictions."""

    def __init__(self) -> None:
        self.hit = [0] * AGE_BUCKETS
        self.evicted = [0] * AGE_BUCKETS

    @staticmethod
    def bucket(age: int) -> int:
        return min(age.bit_length(), AGE_BUCKETS - 1)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return pages by age: {"hit": {"<8": 12, ...}, "evicted": {...}}, without empty buckets."""

        def named(counts: list[int]) -> dict[str, int]:
            return {f"<{1 << b}": count for b, count in enumerate(counts) if count}

        return {"hit": named(self.hit), "evicted": named(self.evicted)}
