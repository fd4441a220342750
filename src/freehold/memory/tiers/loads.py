"""Loading prefixes back to the device.

A load belongs to the tree, not to a request: a request waits for it, then matches again. So an abort undoes nothing,
and several requests can wait for one load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from freehold.contract.arrays import Int32, Int64
from freehold.contract.orders import Kind, Order, Outcome
from freehold.contract.prefix_keys import KeyChain
from freehold.contract.slices import finished
from freehold.memory.ledger import owner
from freehold.memory.prefix.node import Match, PinKind
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tails import Tail
from freehold.memory.tiers.host import HostTier
from freehold.memory.tiers.reach import Reach
from freehold.memory.tiers.transfer import Hold, Transfer, TransferTable

LEARNED_FROM = 5  # loads
DECLINED_MAX = 32  # one of so many unprofitable loads begins anyway
# A load takes at most 1/32 of the host, within these bounds in columns.
PIECES, PIECE_LEAST, PIECE_MAX = 32, 4, 4096


class RoomMaker(Protocol):
    """The part of `Room` that a load needs; documented there."""

    def make_for(self, needed: Sequence[int], may_unpin: bool = False, keep: Tail | None = None) -> bool: ...


@dataclass(frozen=True)
class LoadPlan:
    """Loading `columns` [n] of each group from the host lets every group resume from `boundary` tokens."""

    match: Match
    keys: KeyChain
    boundary: int
    columns: Sequence[Int64]

    @property
    def page_counts(self) -> list[int]:
        return [len(part) for part in self.columns]

    @property
    def gain(self) -> int:
        """Tokens that need not be computed."""
        return self.boundary - self.match.length


class Loads:
    """Loads from the host to the device: `loaded_pages` so far. Their speed is learned from the last few."""

    def __init__(
        self, page_bytes: Sequence[int], tree: PrefixTree, host: HostTier, transfers: TransferTable, reach: Reach,
        room: RoomMaker,
    ):  # fmt: skip
        self._reach = reach
        self._page_bytes = page_bytes
        self._tree = tree
        self._host = host
        self._transfers = transfers
        self._room = room
        self._underway: dict[bytes, int] = {}  # by the key of a page being loaded: the load's number
        self._speeds: deque[float] = deque(maxlen=LEARNED_FROM)  # seconds per byte
        self._declined = 0  # unprofitable loads since one of them began
        self.loaded_pages = 0

    def plan(self, match: Match, keys: KeyChain, limit: int) -> LoadPlan | None:
        """Plan a load from the host that takes a sequence further than `match`, with at most `limit` tokens."""
        return finished(self.planning(match, keys, limit))

    def planning(self, match: Match, keys: KeyChain, limit: int) -> Generator[None, None, LoadPlan | None]:
        """Plan a load in slices; it can begin as long as nothing has changed meanwhile."""
        on_device, on_host = yield from self._reach.looking(match, keys, limit)
        boundary = self._reach.boundary(on_device, on_host)
        if boundary <= match.length:
            return None
        return LoadPlan(match, keys, boundary, self._reach.needed(boundary, on_host))

    def seconds(self, plan: LoadPlan) -> float:
        """Estimate how long a load will take: the median of the last loads. Return 0 until there are two, since the
        first one touches memory for the first time."""
        speeds = sorted(self._speeds)
        return self._bytes(plan) * speeds[(len(speeds) - 1) // 2] if len(speeds) > 1 else 0.0

    def pays(self, plan: LoadPlan, token_seconds: float) -> bool:
        """Return whether to load rather than compute, at `token_seconds` a token (0: unknown). One of DECLINED_MAX
        unprofitable loads begins anyway: otherwise it would go unnoticed when loads get fast again."""
        if self.seconds(plan) <= plan.gain * token_seconds or token_seconds == 0:
            return True
        self._declined = (self._declined + 1) % DECLINED_MAX
        return self._declined == 0

    def _bytes(self, plan: LoadPlan) -> int:
        return sum(count * each for count, each in zip(plan.page_counts, self._page_bytes, strict=True))

    def piece_of(self, plan: LoadPlan) -> LoadPlan:
        """Return the first columns of a plan that would take too much of the host at once: pages evicted for a load
        need room there, too. Pages of bounded groups come with the last piece."""
        size, full = self._tree.page_size, self._reach.full
        if not full:
            return plan
        most = min(max(self._host.pages[full[0]].pool.capacity // PIECES, PIECE_LEAST), PIECE_MAX)
        end = plan.match.known // size + most
        if end * size >= plan.boundary:
            return plan
        columns = [part[part < end] if group in full else part[:0] for group, part in enumerate(plan.columns)]
        return replace(plan, boundary=end * size, columns=columns)

    def underway(self, plan: LoadPlan) -> int | None:
        """Return the number of a load that brings the first of these pages, or None."""
        return self._underway.get(plan.keys[min(int(part[0]) for part in plan.columns if len(part))])

    def begin(self, plan: LoadPlan, is_alone: bool, keep: Tail | None = None) -> int | None:
        """Begin the planned load. Return the transfer's number; None if there is no room. `is_alone`: no request runs,
        so even operators' pins give way; `keep` does not."""
        match = plan.match
        hold = self._hold_base(match, plan.boundary)
        names = [plan.keys.at(part.tolist()) for part in plan.columns]
        reads = [pages.hold(part) for pages, part in zip(self._host.pages, names, strict=True)]
        for pages, part in zip(self._host.pages, names, strict=True):
            pages.touch(part)
        if not self._room.make_for(plan.page_counts, is_alone, keep):
            self._let_go(hold, reads)
            return None
        number = self._transfers.next_number()
        by = owner.transfer(number)
        device = [
            pool.allocate(np.full(len(part), by, np.int64))
            for pool, part in zip(self._tree.pools, plan.columns, strict=True)
        ]
        for part in names:
            self._underway.update(dict.fromkeys(part, number))

        kept = replace(plan, match=match.without_nodes())

        def finish(transfer: Transfer, outcome: Outcome) -> None:
            self._finish(kept, transfer, outcome)

        self._transfers.begin(
            Order(number, Kind.LOAD, reads, device, names), finish, device=device, hold=hold, reads=reads
        )
        return number

    def _hold_base(self, match: Match, boundary: int) -> Hold | None:
        """Hold what the device has of the first `boundary` tokens."""
        size, length = self._tree.page_size, min(match.known, boundary)
        node = match.last
        if node is None or length == 0:
            return None
        while node.parent is not None and node.start >= length:
            node = node.parent
        borrowed: list[Int32] = []
        for bounded in self._tree.bounded:
            pages = self._tree.pages_to(node, length, bounded.number)[bounded.group.first_column(boundary, size) :]
            borrowed.append(pages[pages != 0])
        if length < node.end:
            node = self._tree.split(node, length)
        return Hold.on(self._tree, node, PinKind.LOAD, borrowed)

    def _let_go(self, hold: Hold | None, reads: Sequence[Int32]) -> None:
        for pages, part in zip(self._host.pages, reads, strict=True):
            pages.drop(part)
        if hold is not None:
            hold.drop(self._tree)

    def _finish(self, plan: LoadPlan, transfer: Transfer, outcome: Outcome) -> None:
        """Insert the whole load into the tree, or nothing. Free what the tree already has by now."""
        tree, size, namespace = self._tree, self._tree.page_size, plan.match.namespace
        for key in {key for part in transfer.order.keys for key in part}:
            self._underway.pop(key, None)
        is_whole = all(part.all() for part in outcome.whole)
        if is_whole and namespace.weights == tree.weights:
            pages = [np.zeros(plan.boundary // size, np.int32) for _ in transfer.device]
            for row, columns, mine in zip(pages, plan.columns, transfer.device, strict=True):
                row[columns] = mine
            tree.insert(tree.root(namespace), plan.keys.tokens[: plan.boundary], pages, transfer.owner)
            self.loaded_pages += sum(plan.page_counts)
            for one, read in zip(self._host.pages, transfer.reads, strict=True):
                one.loaded(read)
            self._learn(plan, outcome.seconds)
        self._let_go(transfer.hold, transfer.reads)
        for pool, mine in zip(tree.pools, transfer.device, strict=True):
            pool.free(mine[pool.owner[mine] == transfer.owner], transfer.owner, fence=0)

    def _learn(self, plan: LoadPlan, seconds: float) -> None:
        self._speeds.append(seconds / self._bytes(plan))
