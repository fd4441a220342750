"""The oracle of growth: no container of scheduler and memory outgrows what it serves.

`docs/memory.md` states the same bounds, and what happens at each.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from freehold.scheduler.scheduler import Scheduler
from freehold.simulation.census import Census

SMALL = 64  # containers that never have more entries need no bound of their own
NOT_OURS = ("Vocabulary", "Order", "_InFlight")

# "Class.attribute", over all objects of the class -> the limit of entries, in terms of `Sizes`.
BOUNDS = {
    "Scheduler.requests": "requests",
    "WaitingQueue._lines": "requests",
    "WaitingQueue._sorted": "most_requests",
    "WaitingQueue._unranked": "requests",
    "Line._sorted": "requests",
    "Line._entries": "requests",
    "Line._by_number": "requests",
    "Shares._accounts": "requests",
    "Shares._free": "most_requests",
    "Shares._left": "4",
    "Shares._debts": "1024",
    "FairSteps._last": "rows",
    "FairSteps._next_last": "rows",
    "StepTime._rows": "rows",
    "StepTime._seconds": "rows",
    "Lifecycle._deadlines": "6 * most_requests + 1025",
    "Lifecycle.ended": "most_requests",
    "Lifecycle.row_starts": "rows",
    "Request.transitions": "28 * requests",
    "Request.seconds_in": "28 * requests",
    "Request.logprobs": "tokens * requests",
    "Request.prompt_logprobs": "tokens * requests",
    "LeaseTable.leases": "rows",
    "LeaseTable._free_rows": "rows",
    "LeaseTable._limbo_rows": "rows",
    "PagePool._limbo": "2 * limbo",
    "PrefixTree.roots": "nodes",
    "PrefixTree._nodes": "nodes",
    "Node.children": "nodes",
    "Node.pages": "groups * nodes",
    "Node.pins": "4 * nodes",
    "Node.keys": "columns + nodes",
    "PageTables._log": "groups * (1 + 2 * rows)",
    "TailTable._tails": "tails",
    "TailTable._names": "tails",
    "Tail.pages": "groups * tails",
    "PinTable._pins": "pins",
    "KeyedQueue._items": "(2 + 2 * groups) * nodes + pins + 4096",
    "KeyedQueue._entries": "(2 + 2 * groups) * nodes + pins + 4096",
    "ReuseQueue._queues": "4 * nodes + 4",
    "FairEviction._queues": "nodes + 1",
    "FairEviction.page_counts": "nodes",
    "PrefixHistory._evictions": "4096",
    "PageAges.hit": "24 * (1 + groups)",
    "PageAges.evicted": "24 * (1 + groups)",
    "ReuseStatistics._waits": "512",
    "ReuseStatistics._worth": "104",
    "Prefetch.found": "groups * (requests + prefetches)",
    "Storage._underway": "prefetches",
    "Storage._queue": "16384",
    "Storage._fetched_for": "requests + prefetches",
    "TransferTable._transfers": "transfers",
    "Transfer.finish": "groups * 256 * transfers",
    "Transfer.device": "groups * transfers",
    "Transfer.host": "groups * transfers",
    "Transfer.reads": "groups * transfers",
    "KeyChain._digests": "tokens // page_size * (requests + transfers + prefetches)",
    "HostPages._on_device": "groups * columns",
    "Given._above": "groups * columns + moving + arriving",
    "Given._coming": "moving + arriving",
    "HostPages._keys": "host_pages + groups",
    "HostPages._mirrors": "entries",
    "HostPages._alone": "entries",
    "NodesInLine._nodes": "2 * nodes",
    "Backup._rescued": "groups + 3 * moving",
    "Backup._copied": "transfers",
    "Confirming._used": "nodes",
    "Confirming._round": "nodes",
    "Confirming._about": "nodes",
    "Loads._underway": "moving",
    "Loads._speeds": "5",
    "EventLog._told": "columns + entries + 2",
    "EventLog._coming": "arriving + moving",
    "EventLog._events": "0",
}


class Grown(AssertionError):
    """A container keeps entries that are no longer needed."""


@dataclass(frozen=True)
class Sizes:
    """Current sizes. `most_requests` is the most at one time so far."""

    requests: int
    most_requests: int
    rows: int
    tokens: int
    page_size: int
    groups: int
    limbo: int
    moving: int  # device pages that transfers own
    arriving: int  # host pages that transfers own
    nodes: int
    columns: int
    tails: int
    pins: int
    transfers: int
    prefetches: int
    entries: int
    host_pages: int

    @classmethod
    def of(cls, scheduler: Scheduler, census: Census, most_requests: int) -> Sizes:
        memory = scheduler.memory
        tiers = memory.tiers
        return cls(
            requests=len(scheduler.requests),
            most_requests=most_requests,
            rows=memory.shape.row_count,
            tokens=memory.shape.token_limit,
            page_size=memory.page_size,
            groups=len(memory.groups),
            limbo=sum(pool.limbo_count for pool in memory.pools),
            moving=0 if tiers is None else sum(tiers.device_pages(group) for group in range(len(memory.groups))),
            arriving=0 if tiers is None else sum(len(part) for one in tiers.transfers for part in one.host),
            nodes=sum(node.parent is not None or bool(node.children) or node.holds > 0 for node in memory.tree.nodes()),
            columns=memory.tree.page_count,
            tails=len(memory.tails),
            pins=len(memory.pins),
            transfers=0 if tiers is None else len(tiers.transfers),
            prefetches=census.objects["Prefetch"],
            entries=0 if tiers is None else sum(len(pages) for pages in tiers.host.pages),
            host_pages=0 if tiers is None else sum(pages.pool.capacity for pages in tiers.host.pages),
        )


def check_bounds(scheduler: Scheduler, most_requests: int) -> Census:
    """Count everything reachable from the scheduler. Raise Grown."""
    census = Census(scheduler)
    sizes = asdict(Sizes.of(scheduler, census, most_requests))
    for where, entries in census.entries.items():
        if where.startswith(NOT_OURS):
            continue
        limit = eval(BOUNDS[where], {}, sizes) if where in BOUNDS else SMALL
        if entries > limit:
            raise Grown(f"{where} has {entries} entries, the bound is {BOUNDS.get(where, SMALL)} = {limit}")
    if census.objects["Request"] > sizes["requests"]:
        raise Grown(f"{census.objects['Request']} requests are kept, {sizes['requests']} are alive")
    if census.objects["Node"] > sizes["nodes"]:
        raise Grown(f"{census.objects['Node']} nodes are kept, {sizes['nodes']} are in the tree")
    return census
