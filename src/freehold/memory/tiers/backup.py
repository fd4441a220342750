"""What is copied to the host, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import numpy as np

from freehold.arrays import Int32, Int64
from freehold.memory.ledger import owner
from freehold.memory.prefix.node import Node, PinKind
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tiers.host import HostTier
from freehold.memory.tiers.nodes_in_line import NodesInLine
from freehold.memory.tiers.transfer import Hold, Transfer, TransferTable
from freehold.mover import Kind, Order, Outcome

IN_FLIGHT_MAX = 4  # backups
PAGES_MAX = 256  # of each group, in one backup


class WritePolicy(StrEnum):
    """When a prefix is copied to the host."""

    WRITE_THROUGH = "write_through"  # as soon as it is in the tree
    SELECTIVE = "write_through_selective"  # when it has been used again
    WRITE_BACK = "write_back"  # when it is evicted


class Backup:
    """Implements `Watcher` and `Rescuer`: hears what the tree gets, what is used, what goes. `arrived` hears of a group
    and keys that have come to the host."""

    def __init__(
        self, policy: WritePolicy, tree: PrefixTree, host: HostTier, transfers: TransferTable,
        arrived: Callable[[int, Sequence[bytes]], None],
    ):  # fmt: skip
        self._arrived = arrived
        self._policy = policy
        self._tree = tree
        self._host = host
        self._transfers = transfers
        self._waiting = NodesInLine()  # with pages that the host lacks, perhaps
        self._rescued: list[list[tuple[list[bytes], Int32]]] = [[] for _ in host.pages]
        self._rescuer: int | None = None  # the number of the transfer that will have what was rescued
        self._is_stalled = False  # copies are late: their pages are given up, and no more are handed over
        self.has_news = False  # since the last `begin`
        self.abandoned = 0  # pages whose copies were not waited for
        self.dropped = 0  # pages for which the host had no room
        self.written = 0  # pages

    @property
    def copies_evictions(self) -> bool:
        return self._policy is WritePolicy.WRITE_BACK and not self._is_stalled

    # -- what the tree tells --------------------------------------------------------------------------

    def appeared(self, node: Node, group: int, columns: Int64) -> None:
        self._host.pages[group].appeared(node.keys_at(columns))
        is_known = self._policy is WritePolicy.SELECTIVE and node.hits > 0  # it was evicted, and is back
        if self._policy is WritePolicy.WRITE_THROUGH or is_known:
            self._wait(node)

    def vanished(self, node: Node, group: int, columns: Int64) -> None:
        self._host.pages[group].vanished(node.keys_at(columns))

    def cleared(self) -> None:
        for pages in self._host.pages:
            pages.cleared()

    def left(self, node: Node) -> None:
        self._waiting.remove(node)

    def cut(self, upper: Node, node: Node) -> None:
        if node in self._waiting:
            self._wait(upper)
            self._waiting.put(node)

    def used(self, node: Node) -> None:
        if self._policy is WritePolicy.SELECTIVE:
            self.ask_for(node)

    def ask_for(self, node: Node) -> None:
        """Copy a node and all before it, whatever the policy is."""
        for part in self._tree.path(node):
            self._wait(part)

    def _wait(self, node: Node) -> None:
        """It has its turn when copies in flight have ended."""
        self._waiting.put(node)
        self.has_news = True

    def take(self, node: Node, group: int, columns: Int64) -> Int64:
        """With write_back, pages that are evicted go to a transfer, as far as the host has room for them. While copies
        are late none do: room that each of them had to wait for would never come."""
        if self._policy is not WritePolicy.WRITE_BACK or node.namespace.weights != self._tree.weights:
            return columns[:0]
        new = ~self._host.pages[group].has(node.keys_at(columns))
        if self._is_stalled:
            self.abandoned += int(np.count_nonzero(new))
            return columns[:0]
        room = self._host.pages[group].pool.capacity // 2 - sum(len(pages) for _, pages in self._rescued[group])
        taken = columns[new][: max(room, 0)]
        self.dropped += int(np.count_nonzero(new)) - len(taken)
        if len(taken):
            if self._rescuer is None:
                self._rescuer = self._transfers.next_number()
                self.has_news = True
            pages = node.pages[group][taken]
            self._tree.pools[group].move(pages, owner.node(node.serial), owner.transfer(self._rescuer))
            self._rescued[group].append((node.keys_at(taken), pages))
            self._tell_of(group, node, taken)
        return taken

    # -- copying --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin what there is to copy. Called in every iteration."""
        self.has_news = False
        self._give_up_late_ones()
        self._begin_rescue()
        busy = self._transfers.count(Kind.BACKUP)
        for _ in range(len(self._waiting)):
            if busy >= IN_FLIGHT_MAX:
                return
            node = self._waiting.pop()
            if node.pins[PinKind.BACKUP]:
                self._waiting.put(node)  # what is left of it follows
            elif self._is_in_tree(node):
                busy += self._copy(node)

    def _is_in_tree(self, node: Node) -> bool:
        return node.parent is not None and node.namespace.weights == self._tree.weights

    def _copy(self, node: Node) -> bool:
        """Copy what the host lacks of a node -> whether there is anything."""
        sources: list[Int32] = []
        keys: list[list[bytes]] = []
        is_more = False
        for group, pages in enumerate(node.pages):
            there = pages.nonzero()[0]
            lacking = there[~self._host.pages[group].has(node.keys_at(there))]
            is_more |= len(lacking) > PAGES_MAX
            lacking = lacking[:PAGES_MAX]
            sources.append(pages[lacking])
            keys.append(node.keys_at(lacking))
            self._tell_of(group, node, lacking)
        if not any(len(pages) for pages in sources):
            return False
        borrowed = [sources[bounded.number] for bounded in self._tree.bounded]
        hold = Hold.on(self._tree, node, PinKind.BACKUP, borrowed)
        number = self._transfers.next_number()
        host, sources, keys = self._room_for(number, sources, keys)
        if not any(len(pages) for pages in sources):
            hold.drop(self._tree)
            return False
        if is_more:
            self._waiting.put(node)
        self._transfers.begin(Order(number, Kind.BACKUP, host, sources, keys), self._finish, host=host, hold=hold)
        return True

    def _tell_of(self, group: int, node: Node, columns: Int64) -> None:
        """They will be copied: followers will want to know what they are."""
        events = self._host.pages[group].events
        if events is not None:
            events.copied(node, columns)

    def _room_for(
        self, number: int, sources: Sequence[Int32], keys: Sequence[list[bytes]]
    ) -> tuple[list[Int32], list[Int32], list[list[bytes]]]:
        """Host pages for as many of `sources` as there is room for -> those, and the sources and keys."""
        by = owner.transfer(number)
        host = [pages.allocate(len(part), by) for pages, part in zip(self._host.pages, sources, strict=True)]
        counts = [len(part) for part in host]
        self.dropped += sum(len(part) for part in sources) - sum(counts)
        for pages, part, count in zip(self._host.pages, keys, counts, strict=True):
            pages.arrived(part[count:])
        kept = [part[:count] for part, count in zip(sources, counts, strict=True)]
        return host, kept, [part[:count] for part, count in zip(keys, counts, strict=True)]

    def _begin_rescue(self) -> None:
        """Copy what was evicted since the last call."""
        if self._rescuer is None:
            return
        number, self._rescuer = self._rescuer, None
        rescued, self._rescued = self._rescued, [[] for _ in self._rescued]
        sources = [np.concatenate([np.empty(0, np.int32), *(pages for _, pages in parts)]) for parts in rescued]
        keys = [[key for part, _ in parts for key in part] for parts in rescued]
        host, kept, keys = self._room_for(number, sources, keys)
        for pool, pages, part in zip(self._tree.pools, sources, kept, strict=True):
            pool.free(pages[len(part) :], owner.transfer(number), self._tree.epochs.submitted)
        self._transfers.begin(Order(number, Kind.BACKUP, host, kept, keys), self._finish, device=kept, host=host)

    def _finish(self, transfer: Transfer, outcome: Outcome) -> None:
        order = transfer.order
        for group, (pages, host, whole) in enumerate(zip(self._host.pages, order.host, outcome.whole, strict=True)):
            arrived = pages.settle(order.keys[group], host, whole, transfer.owner)
            self._arrived(group, arrived)
            self.written += len(arrived)
        self._give_back(transfer)

    def _give_back(self, transfer: Transfer) -> None:
        """What a backup has on the device."""
        for pool, pages in zip(self._tree.pools, transfer.device, strict=True):
            pool.free(pages, transfer.owner, transfer.fence)
        if transfer.hold is not None:
            transfer.hold.drop(self._tree)

    def give_up(self) -> None:
        """Memory is short: pages that are being copied can be evicted now."""
        for transfer in list(self._transfers):
            if transfer.order.kind is Kind.BACKUP and transfer.hold is not None:
                self._abandon(transfer)

    def _give_up_late_ones(self) -> None:
        ours = [transfer for transfer in self._transfers if transfer.order.kind is Kind.BACKUP]
        late = [transfer for transfer in ours if self._transfers.is_late(transfer)]
        for transfer in late:
            if transfer.finish != self._discard:
                self._abandon(transfer)
        self._is_stalled = bool(late)

    def _abandon(self, transfer: Transfer) -> None:
        """Give its device pages back: they may be overwritten, so nothing that it copies is believed. Host pages stay
        with it for as long as somebody may write to them."""
        self.abandoned += sum(transfer.order.page_counts)
        self._give_back(transfer)
        self._transfers.let_go(transfer, self._discard)

    def _discard(self, transfer: Transfer, outcome: Outcome) -> None:
        self._host.free(transfer.order.host, transfer.owner)
        for pages, keys in zip(self._host.pages, transfer.order.keys, strict=True):
            pages.arrived(keys)

    def portrait(self) -> list[tuple[int, bytes]]:
        """What waits, in order: where prefixes end, with the key of their last page."""
        evicted = [(0, key) for parts in self._rescued for keys, _ in parts for key in keys]
        return [*((node.end, node.keys[-1]) for node in self._waiting), *evicted]

    # -- for counting ---------------------------------------------------------------------------------

    def rescued_pages(self, group: int) -> Int32:
        """Device pages that were evicted and are not in an order yet."""
        return np.concatenate([np.empty(0, np.int32), *(pages for _, pages in self._rescued[group])])

    @property
    def queued_pages(self) -> int:
        """Pages of nodes that wait to be looked at, and of evictions that wait to be copied."""
        evicted = sum(len(self.rescued_pages(group)) for group in range(len(self._rescued)))
        return self._waiting.page_count + evicted

    @property
    def rescue_owner(self) -> int:
        return owner.transfer(self._rescuer or 0)
