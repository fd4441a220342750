"""Hit rates of a prefix cache of a given size on a trace, by policy, and of an optimal one.

Requests come one after another and need memory only for their prompts: this compares eviction alone, in the server's
own prefix tree. The optimum, which knows the future, has a cache of single pages.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from freehold.memory import Memory, MemoryShape
from freehold.memory.prefix.keyed_queue import KeyedQueue
from freehold.memory.prefix.node import Namespace
from freehold.planning.trace import Arrival

NEVER = 1 << 60


class Block:
    """A page of the optimum's cache."""

    def __init__(self, page: int, parent: Block | None):
        self.page = page  # the same number each time it is cached
        self.parent = parent
        self.child_count = 0
        self.cached = True
        self.next_used = NEVER
        self.pinned = True  # while its request is processed

    @property
    def evictable(self) -> bool:
        return self.cached and not self.child_count and not self.pinned


def optimum(block: Block) -> int | None:
    """Return a key that evicts the leaf with the farthest next use (Belady 1966). It is an upper bound only without
    sharing, but the literature on prefix caches compares against it."""
    return -block.next_used if block.evictable else None


def hit_rates(
    arrivals: Sequence[Arrival], page_size: int, page_count: int, policies: Sequence[str]
) -> dict[str, float]:
    """Return the share of prompt tokens found in the cache, by policy and, as "optimum", with the future known."""
    total = sum(len(arrival.prompt) for arrival in arrivals)
    hits = {name: _hits(arrivals, page_size, page_count, name) for name in policies}
    hits["optimum"] = page_size * _optimal_hits(_paths(arrivals, page_size), page_count)
    return {name: count / total for name, count in hits.items()}


def _hits(arrivals: Sequence[Arrival], page_size: int, page_count: int, policy: str) -> int:
    """Return the tokens found."""
    longest = max(len(arrival.prompt) for arrival in arrivals)
    memory = Memory(MemoryShape(page_count, page_size, 1, longest + page_size, policy))
    hits = 0
    for arrival in arrivals:
        match = memory.tree.match(Namespace(), arrival.prompt)
        hits += match.length
        lease = memory.leases.open(match)
        lease.use()
        fits = memory.capacity_tokens - memory.tree.holds.page_count * page_size + match.length
        end = min(len(arrival.prompt), max(fits, match.length))
        row, target = np.array([lease.row]), np.array([end - end % page_size])
        assert memory.room.make(row, target)
        memory.leases.extend(row, target)
        memory.leases.commit(row, target, target)
        lease.publish(arrival.prompt)
        lease.release()
        memory.leases.page_tables.take_updates()
    return hits


def _paths(arrivals: Sequence[Arrival], page_size: int) -> list[list[int]]:
    """Return the full pages of each prompt as numbers: equal numbers mean equal tokens after equal tokens."""
    numbers: dict[tuple[int, bytes], int] = {}
    paths: list[list[int]] = []
    for arrival in arrivals:
        path, parent = [], -1
        for at in range(0, len(arrival.prompt) - page_size + 1, page_size):
            parent = numbers.setdefault((parent, arrival.prompt[at : at + page_size].tobytes()), len(numbers))
            path.append(parent)
        paths.append(path)
    return paths


def _optimal_hits(paths: list[list[int]], page_count: int) -> int:
    """Return the pages found."""
    uses: dict[int, list[int]] = defaultdict(list)
    for now, path in enumerate(paths):
        for page in path:
            uses[page].append(now)
    cached: dict[int, Block] = {}
    queue, hits = KeyedQueue(optimum), 0
    for now, path in enumerate(paths):
        found = 0
        while found < len(path) and path[found] in cached:
            found += 1
        hits += found
        blocks = [cached[page] for page in path[:found]]
        for block in blocks:
            block.pinned = True
        for page in path[found:]:
            if len(cached) >= page_count and not _evict(cached, queue):
                break
            parent = blocks[-1] if blocks else None
            if parent is not None:
                parent.child_count += 1
            blocks.append(Block(page, parent))
            cached[page] = blocks[-1]
        for block in blocks:
            following = bisect.bisect_right(uses[block.page], now)
            block.next_used = uses[block.page][following] if following < len(uses[block.page]) else NEVER
            block.pinned = False
        if blocks and blocks[-1].evictable:
            queue.put(blocks[-1])  # its next use may be nearer or farther now
    return hits


def _evict(cached: dict[int, Block], queue: KeyedQueue[Block]) -> bool:
    block = queue.pop()
    if block is None:
        return False
    block.cached = False
    del cached[block.page]
    parent = block.parent
    if parent is not None:
        parent.child_count -= 1
        if parent.evictable:
            queue.put(parent)  # an earlier entry may have a nearer use
    return True
