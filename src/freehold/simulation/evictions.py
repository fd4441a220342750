"""What a prefix cache of so many pages would hit in a trace, by policy, beside the best that any policy could.

Requests come one after the other and need no memory of their own: nothing but eviction is compared. A policy
orders leaves, as in the server, with the server's own queue.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

from freehold.memory.eviction import POLICIES, EvictionQueue, Key
from freehold.simulation.trace import Arrival

NEVER = 1 << 60


class Block:
    """A page of the cache, with what policies look at (see `freehold.memory.node.Node`)."""

    def __init__(self, serial: int, parent: Block | None, now: int):
        self.serial = serial
        self.parent = parent
        self.child_count = 0
        self.cached = True
        self.queued = False
        self.level = self.hits = self.priority = 0
        self.created = self.last_used = now
        self.next_used = NEVER
        self.pinned = True  # while its request is looked at

    @property
    def evictable(self) -> bool:
        return self.cached and not self.child_count and not self.pinned


def optimum(node: Any) -> Key:
    """Whose next use is farthest away (Belady 1966), among leaves: an upper bound only without sharing, but
    what is compared against in the literature on prefix caches."""
    return 0, -node.next_used, 0


def hit_rates(
    arrivals: Sequence[Arrival], page_size: int, page_count: int, policies: Sequence[str]
) -> dict[str, float]:
    """Share of prompt tokens found in the cache, by policy and, as "optimum", with the future known."""
    paths = _paths(arrivals, page_size)
    uses: dict[int, list[int]] = defaultdict(list)
    for now, path in enumerate(paths):
        for serial in path:
            uses[serial].append(now)
    total = sum(len(arrival.prompt) for arrival in arrivals)
    keys: dict[str, Callable[[Any], Key]] = {name: cast(Any, POLICIES[name]) for name in policies}
    keys["optimum"] = optimum
    return {name: page_size * _hits(paths, uses, page_count, key) / total for name, key in keys.items()}


def _paths(arrivals: Sequence[Arrival], page_size: int) -> list[list[int]]:
    """The full pages of each prompt, numbered: one number means the same tokens after the same tokens."""
    numbers: dict[tuple[int, bytes], int] = {}
    paths: list[list[int]] = []
    for arrival in arrivals:
        path, parent = [], -1
        for at in range(0, len(arrival.prompt) - page_size + 1, page_size):
            parent = numbers.setdefault((parent, arrival.prompt[at : at + page_size].tobytes()), len(numbers))
            path.append(parent)
        paths.append(path)
    return paths


def _hits(paths: list[list[int]], uses: dict[int, list[int]], page_count: int, key: Callable[[Any], Key]) -> int:
    cached: dict[int, Block] = {}
    queue = EvictionQueue(key)
    hits = 0
    for now, path in enumerate(paths):
        found = 0
        while found < len(path) and path[found] in cached:
            found += 1
        hits += found
        blocks = [cached[serial] for serial in path[:found]]
        for block in blocks:
            block.pinned, block.last_used = True, now
            block.hits += 1
        for serial in path[found:]:
            if len(cached) >= page_count and not _evict(cached, queue):
                break
            parent = blocks[-1] if blocks else None
            if parent is not None:
                parent.child_count += 1
            blocks.append(Block(serial, parent, now))
            cached[serial] = blocks[-1]
        for block in blocks:
            following = bisect.bisect_right(uses[block.serial], now)
            block.next_used = uses[block.serial][following] if following < len(uses[block.serial]) else NEVER
            block.pinned = False
        if blocks and blocks[-1].evictable:
            queue.lower(cast(Any, blocks[-1]))  # its next use has changed, whichever way
    return hits


def _evict(cached: dict[int, Block], queue: EvictionQueue) -> bool:
    block = cast("Block | None", queue.pop())
    if block is None:
        return False
    block.cached = False
    del cached[block.serial]
    parent = block.parent
    if parent is not None:
        parent.child_count -= 1
        if parent.evictable:
            queue.push(cast(Any, parent))
    return True
