"""Transfers: pages moving between two tiers. All end in `TransferTable.settle_all`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from freehold.contract.arrays import Int32
from freehold.contract.orders import Kind, Mover, Order, Outcome, Outcomes
from freehold.memory.ledger import owner
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.prefix.node import Node, PinKind
from freehold.memory.prefix.tree import PrefixTree

# Deadlines in seconds: nothing waits for a later transfer.
LATE_S = {Kind.BACKUP: 2.0, Kind.LOAD: 2.0, Kind.STORE: 10.0, Kind.FETCH: 10.0, Kind.PROBE: 10.0}


@dataclass(frozen=True)
class Hold:
    """A pin on a node, and one reader more for pages of bounded groups (`borrowed`, one array for each)."""

    node: Node
    kind: PinKind
    borrowed: Sequence[Int32]

    @classmethod
    def on(cls, tree: PrefixTree, node: Node, kind: PinKind, borrowed: Sequence[Int32]) -> Hold:
        tree.holds.add(node, kind)
        for bounded, pages in zip(tree.bounded, borrowed, strict=True):
            bounded.borrow(pages)
        return cls(node, kind, borrowed)

    def drop(self, tree: PrefixTree) -> None:
        for bounded, pages in zip(tree.bounded, self.borrowed, strict=True):
            bounded.give_back(pages, 0)
        tree.holds.unpin(self.node, self.kind, fence=0)


@dataclass(frozen=True)
class Transfer:
    """Owns `device` and `host` pages (int32 [n] for each group) and holds what it reads. Steps up to `fence` may still
    read its device pages. `begun`: seconds of the scheduler's clock. `finish` handles the outcome."""

    order: Order
    begun: float
    fence: int
    device: Sequence[Int32]
    host: Sequence[Int32]
    hold: Hold | None
    reads: Sequence[Int32]  # host pages of each group
    finish: Callable[[Transfer, Outcome], None]

    @property
    def owner(self) -> int:
        return owner.transfer(self.order.number)


@dataclass
class TransferCounts:
    """Transfers of one kind. `seconds`: how long the mover's threads spent on ended ones."""

    in_flight: int = 0
    ended: int = 0
    failed: int = 0
    seconds: float = 0.0


class TransferTable:
    """The transfers in flight. Their numbers are separate: a slow copy must not hold up the numbering of steps."""

    def __init__(self, mover: Mover, group_count: int, epochs: Epochs):
        self.outcomes = Outcomes()
        self.now = 0.0  # seconds of the scheduler's clock
        self.counts = {kind: TransferCounts() for kind in Kind}
        self._mover = mover
        self._epochs = epochs
        self._nothing = [np.empty(0, np.int32)] * group_count
        self._transfers: dict[int, Transfer] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._transfers.values())

    def count(self, kind: Kind) -> int:
        return sum(transfer.order.kind is kind for transfer in self)

    def is_awaited(self, number: int) -> bool:
        """Return whether a transfer is in flight and not late."""
        transfer = self._transfers.get(number)
        return transfer is not None and not self.is_late(transfer)

    def is_late(self, transfer: Transfer) -> bool:
        return self.now - transfer.begun > LATE_S[transfer.order.kind]

    def next_number(self) -> int:
        """Return the number of a transfer about to begin: the owner of its pages must be known first."""
        self._serial += 1
        return self._serial

    def begin(
        self,
        order: Order,
        finish: Callable[[Transfer, Outcome], None],
        device: Sequence[Int32] | None = None,
        host: Sequence[Int32] | None = None,
        hold: Hold | None = None,
        reads: Sequence[Int32] | None = None,
    ) -> None:
        """Hand an order to the mover."""
        nothing = self._nothing
        self._transfers[order.number] = Transfer(
            order, self.now, self._epochs.submitted, device or nothing, host or nothing, hold, reads or nothing, finish
        )
        self._mover.begin(order, self.outcomes.report)

    def let_go(self, transfer: Transfer, finish: Callable[[Transfer, Outcome], None]) -> None:
        """Let the transfer continue without its device pages and hold, which the caller gives back."""
        self._transfers[transfer.order.number] = replace(transfer, device=self._nothing, hold=None, finish=finish)

    @property
    def are_awaited(self) -> bool:
        """Whether any transfer is not late."""
        return any(not self.is_late(transfer) for transfer in self)

    def wait(self, seconds: float) -> None:
        """Wait for an outcome, at most `seconds`."""
        self._mover.wait(seconds)

    def settle_all(self, now: float) -> None:
        """End the transfers that have an outcome. Called in every iteration before planning. Repeated outcomes are
        ignored."""
        self.now = now
        for outcome in self.outcomes.take():
            transfer = self._transfers.pop(outcome.number, None)
            if transfer is not None:
                self._count(transfer.order.kind, outcome)
                transfer.finish(transfer, outcome)

    def _count(self, kind: Kind, outcome: Outcome) -> None:
        counts = self.counts[kind]
        counts.ended += 1
        counts.failed += outcome.error is not None
        counts.seconds += outcome.seconds
