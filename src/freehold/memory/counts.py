"""Pages of a pool by owner."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from freehold.memory.parts import Parts


@dataclass(frozen=True)
class PageCounts:
    """Pages of one pool by owner, adding up to `capacity`. Of a bounded group, `pinned` counts borrowed pages."""

    capacity: int
    free: int
    limbo: int
    lease: int
    tail: int  # partial last pages of parked sessions
    pinned: int  # owned by the tree, on a path that is in use
    tree: int  # owned by the tree, evictable
    transfer: int = 0  # being moved from or to another tier

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def count_pages(memory: Parts, group: int = 0) -> PageCounts:
    """Count pages by owner, from running counters: cheap enough for metrics. The rest belongs to leases."""
    pool, tree = memory.pools[group], memory.tree
    in_tree, pinned = tree.page_count, tree.holds.page_count
    for bounded in tree.bounded:
        if bounded.number == group:
            in_tree, pinned = bounded.page_count, bounded.borrowed_count
    moving = 0 if memory.tiers is None else memory.tiers.device_pages(group)
    return PageCounts(
        capacity=pool.capacity,
        free=pool.free_count,
        limbo=pool.limbo_count,
        lease=pool.held_count - in_tree - memory.tails.page_count - moving,
        tail=memory.tails.page_count,
        pinned=pinned,
        tree=in_tree - pinned,
        transfer=moving,
    )
