"""Which pages are copied to the host, and when."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

import numpy as np

from freehold.contract.arrays import Int32, Int64
from freehold.contract.orders import Kind, Order, Outcome
from freehold.memory.ledger import owner
from freehold.memory.prefix.node import Node, PinKind
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tiers.backoff import Backoff
from freehold.memory.tiers.confirming import Confirming
from freehold.memory.tiers.host import HostPages, HostTier
from freehold.memory.tiers.nodes_in_line import NodesInLine
from freehold.memory.tiers.transfer import Hold, Transfer, TransferTable

IN_FLIGHT_MAX = 4  # backups
PAGES_MAX = 256  # of each group, in one backup
LOOKED_AT_MAX = 16  # nodes per iteration
ASKED_RETRY_MAX_S = 4.0  # between two copies of requested nodes: a client waits for them
OWED_SHARE = 8  # an eighth of the host may hold pages waiting for storage


class WritePolicy(StrEnum):
    """When a prefix is copied to the host."""

    WRITE_THROUGH = "write_through"  # as soon as it is in the tree
    SELECTIVE = "write_through_selective"  # when it has been used again
    WRITE_BACK = "write_back"  # when it is evicted


class Backup:
    """Implements `Watcher` and `Rescuer`, following the tree. `arrived` gets a group and its keys that reached the
    host.

    Nodes are copied ahead of eviction while the host has free pages, or through the host to storage. A page evicted
    without a copy is copied at eviction. The policy says which nodes get copies at all.
    """

    def __init__(
        self, policy: WritePolicy, tree: PrefixTree, host: HostTier, transfers: TransferTable,
        arrived: Callable[[int, Sequence[bytes]], None], confirming: Confirming,
    ):  # fmt: skip
        self._arrived = arrived
        self._confirming = confirming
        self._policy = policy
        self._tree = tree
        self._host = host
        self._transfers = transfers
        # Nodes that the host may lack pages of. For requested ones, other entries are evicted.
        self._asked, self._waiting = NodesInLine(Backoff(ASKED_RETRY_MAX_S)), NodesInLine(Backoff())
        self._copied: dict[int, tuple[Node, NodesInLine]] = {}  # by transfer: the node, and its line
        self._all: Iterator[Node] = iter(())  # the rest of a walk over all nodes
        # Of each group, by eviction: keys and pages, each part in the order of its prefix.
        self._rescued: list[list[tuple[list[bytes], Int32]]] = [[] for _ in host.pages]
        self._rescuer: int | None = None  # the number of the transfer that will take the rescued pages
        self._is_stalled = False  # copies are late: their pages are abandoned, and no more are handed over
        self.has_news = False  # since the last `begin`
        self.abandoned = 0  # pages whose copies were not waited for
        self.dropped = 0  # pages for which the host had no room
        self.written = 0  # pages

    @property
    def copies_evictions(self) -> bool:
        """Whether evicted pages are likely to be copied at eviction."""
        is_full = any(pages.pool.free_count == 0 for pages in self._host.pages)
        return not self._is_stalled and (self._policy is WritePolicy.WRITE_BACK or is_full)

    # -- what the tree tells --------------------------------------------------------------------------

    def appeared(self, node: Node, group: int, columns: Int64) -> None:
        self._host.pages[group].appeared(node.keys_at(columns))
        self.look_again(node)

    def vanished(self, node: Node, group: int, columns: Int64) -> None:
        self._host.pages[group].vanished(node.keys_at(columns))

    def cleared(self) -> None:
        for pages in self._host.pages:
            pages.cleared()

    def left(self, node: Node) -> None:
        for line in (self._asked, self._waiting):
            line.remove(node)
        self._confirming.left(node)

    def cut(self, upper: Node, node: Node) -> None:
        for line in (self._asked, self._waiting):
            if node in line:
                self._wait(line, upper, node)

    def used(self, node: Node) -> None:
        self._confirming.used(node)
        if self._policy is WritePolicy.SELECTIVE:
            self._wait(self._waiting, *self._tree.path(node))

    def look_again(self, node: Node) -> None:
        """Queue a node for copying ahead, if the policy says so."""
        if self._policy is not WritePolicy.WRITE_BACK and self._is_in_tree(node) and self._has_copies(node):
            self._wait(self._waiting, node)

    def ask_for(self, node: Node) -> None:
        """Queue a node and its ancestors for copying under any policy. Other entries are evicted for them."""
        self._wait(self._asked, *self._tree.path(node))

    def _wait(self, line: NodesInLine, *nodes: Node) -> None:
        """Queue nodes: they are copied as copies in flight end."""
        for node in nodes:
            line.put(node)
        self.has_news = True

    def take(self, node: Node, group: int, columns: Int64) -> Int64:
        """Hand evicted pages that the host lacks to a transfer. While copies are late hand over none: the request that
        needs the room would wait for each."""
        if node.namespace.weights != self._tree.weights or not self._has_copies(node):
            return columns[:0]
        new = ~self._host.pages[group].has(node.keys_at(columns))
        if self._is_stalled:
            self.abandoned += int(np.count_nonzero(new))
            return columns[:0]
        taken = columns[new][: self._host.pages[group].pool.capacity]
        if len(taken):
            if self._rescuer is None:
                self._rescuer = self._transfers.next_number()
                self.has_news = True
            keys, pages = node.keys_at(taken), node.pages[group][taken]
            self._tree.pools[group].move(pages, owner.node(node.serial), owner.transfer(self._rescuer))
            self._rescued[group].append((keys, pages))
            self._host.pages[group].given.coming(keys)
            self._tell_of(group, node, taken)
        return taken

    def _has_copies(self, node: Node) -> bool:
        """Return whether the policy wants copies of a node."""
        return self._policy is not WritePolicy.SELECTIVE or node.hits > 0

    # -- copying --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin pending copies. Called in every iteration."""
        self.has_news = False
        self._give_up_late_ones()
        self._begin_rescue()
        self._look_for_more()
        self._copy_some_of(self._asked, lambda pages: pages.pool.capacity)
        self._copy_some_of(self._waiting, self._room_ahead)

    def _look_for_more(self) -> None:
        """Walk over all nodes once there is room for more copies, because copies were evicted or storage is new."""
        if any(pages.is_incomplete and self._room_ahead(pages) > 0 for pages in self._host.pages):
            for pages in self._host.pages:
                pages.is_incomplete = False
            self._all = self._tree.nodes()
        for node in itertools.islice(self._all, LOOKED_AT_MAX):
            self.look_again(node)

    def _copy_some_of(self, line: NodesInLine, room_in: Callable[[HostPages], int]) -> None:
        """Copy some nodes of a line. A node without room goes to its end."""
        if not line.backoff.is_over(self._transfers.now):
            return
        busy = self._transfers.count(Kind.BACKUP)
        for _ in range(min(len(line), LOOKED_AT_MAX)):
            room = [room_in(pages) for pages in self._host.pages]
            if busy >= IN_FLIGHT_MAX or not any(room):
                return
            node = line.pop()
            if node.pins[PinKind.BACKUP]:
                line.put(node)  # the rest of it follows
            elif self._is_in_tree(node):
                busy += self._copy(node, room, line)
            self.has_news |= node not in line and len(line) > 0

    def _room_ahead(self, pages: HostPages) -> int:
        """Return how many pages copies ahead of eviction may take: only free ones, since entries are more useful. With
        storage behind the host they may take more, until those are stored."""
        through = 0
        if self._host.leads_to_storage:
            through = pages.pool.capacity // OWED_SHARE + 1 - int(np.count_nonzero(pages.given.owed))
        return max(pages.pool.free_count, through)

    def _is_in_tree(self, node: Node) -> bool:
        return node.parent is not None and node.namespace.weights == self._tree.weights

    def _copy(self, node: Node, room: Sequence[int], line: NodesInLine) -> bool:
        """Copy what the host lacks of a node, at most `room` pages of each group. Return whether a copy has begun. If
        pages are left, the node waits in `line` again."""
        sources: list[Int32] = []
        keys: list[list[bytes]] = []
        for group, pages in enumerate(node.pages):
            lacking, most = self._lacking(node, group, pages.nonzero()[0]), min(room[group], PAGES_MAX)
            if len(lacking) > most:
                line.put(node)
            lacking = lacking[:most]
            sources.append(pages[lacking])
            keys.append(node.keys_at(lacking))
            self._tell_of(group, node, lacking)
        if not any(len(pages) for pages in sources):
            return False
        borrowed = [sources[bounded.number] for bounded in self._tree.bounded]
        hold = Hold.on(self._tree, node, PinKind.BACKUP, borrowed)
        number = self._transfers.next_number()
        wanted = sum(len(pages) for pages in sources)
        host, sources, keys = self._room_for(number, sources, keys)
        if sum(len(pages) for pages in sources) < wanted:
            line.put(node)
        if not any(len(pages) for pages in sources):
            hold.drop(self._tree)
            return False
        self._copied[number] = node, line
        self._transfers.begin(Order(number, Kind.BACKUP, host, sources, keys), self._finish, host=host, hold=hold)
        return True

    def _lacking(self, node: Node, group: int, there: Int64) -> Int64:
        """Return the columns among `there` [n] that the host lacks. If the host is full and leads to storage, storage
        must lack them, too."""
        pages, keys = self._host.pages[group], node.keys_at(there)
        lacking = ~pages.has(keys)
        if pages.pool.free_count == 0 and self._host.leads_to_storage:
            lacking &= ~pages.given.of_device(keys)
        return there[lacking]

    def _tell_of(self, group: int, node: Node, columns: Int64) -> None:
        """Announce copies to the event log, which needs the tokens of the pages."""
        events = self._host.pages[group].events
        if events is not None:
            events.copied(node, columns)

    def _room_for(
        self, number: int, sources: Sequence[Int32], keys: Sequence[list[bytes]]
    ) -> tuple[list[Int32], list[Int32], list[list[bytes]]]:
        """Allocate host pages for as many of `sources` as fit. Return them with the remaining sources and keys."""
        by = owner.transfer(number)
        host = [pages.allocate(len(part), by) for pages, part in zip(self._host.pages, sources, strict=True)]
        counts = [len(part) for part in host]
        self.dropped += sum(len(part) for part in sources) - sum(counts)
        for pages, part, count in zip(self._host.pages, keys, counts, strict=True):
            pages.arrived(part[count:])
        kept = [part[:count] for part, count in zip(sources, counts, strict=True)]
        return host, kept, [part[:count] for part, count in zip(keys, counts, strict=True)]

    def _begin_rescue(self) -> None:
        """Copy what was evicted since the last call. Ends of prefixes were evicted before their beginnings, so the
        newest parts come first: if room is short, the host keeps the beginnings."""
        if self._rescuer is None:
            return
        number, self._rescuer = self._rescuer, None
        rescued, self._rescued = [parts[::-1] for parts in self._rescued], [[] for _ in self._rescued]
        sources = [np.concatenate([np.empty(0, np.int32), *(pages for _, pages in parts)]) for parts in rescued]
        keys = [[key for part, _ in parts for key in part] for parts in rescued]
        host, kept, keys = self._room_for(number, sources, keys)
        for pool, pages, part in zip(self._tree.pools, sources, kept, strict=True):
            pool.free(pages[len(part) :], owner.transfer(number), self._tree.epochs.submitted)
        self._transfers.begin(Order(number, Kind.BACKUP, host, kept, keys), self._arrive, device=kept, host=host)

    def _finish(self, transfer: Transfer, outcome: Outcome) -> None:
        """End a copy made ahead. Requested entries are owed to storage, so that other copies don't replace them."""
        self._arrive(transfer, outcome)
        node, line = self._copied.pop(transfer.order.number)
        if line is self._asked:
            for pages, keys in zip(self._host.pages, transfer.order.keys, strict=True):
                pages.given.owe(pages.pages_of(keys))
        if all(whole.all() for whole in outcome.whole):
            line.backoff.succeeded()
        else:
            self._try_again(node, line)

    def _arrive(self, transfer: Transfer, outcome: Outcome) -> None:
        order = transfer.order
        for group, (pages, whole) in enumerate(zip(self._host.pages, outcome.whole, strict=True)):
            arrived = pages.settle(order.keys[group], order.host[group], whole, transfer.owner)
            self._arrived(group, arrived)
            self.written += len(arrived)
        self._give_back(transfer)

    def _try_again(self, node: Node, line: NodesInLine) -> None:
        """Retry a node and its ancestors after a pause: it may have been cut since."""
        line.backoff.failed(self._transfers.now)
        if self._is_in_tree(node):
            self._wait(line, *self._tree.path(node))

    def _give_back(self, transfer: Transfer) -> None:
        """Release what a backup holds on the device."""
        for pool, pages in zip(self._tree.pools, transfer.device, strict=True):
            pool.free(pages, transfer.owner, transfer.fence)
        if transfer.hold is not None:
            transfer.hold.drop(self._tree)

    def give_up(self) -> bool:
        """Abandon the newest copy so that its pages can be evicted. Return whether there was one."""
        ours = [one for one in self._transfers if one.order.kind is Kind.BACKUP and one.hold is not None]
        if ours:
            self._abandon(ours[-1])
        return len(ours) > 0

    def _give_up_late_ones(self) -> None:
        ours = [transfer for transfer in self._transfers if transfer.order.kind is Kind.BACKUP]
        late = [transfer for transfer in ours if self._transfers.is_late(transfer)]
        for transfer in late:
            if transfer.finish != self._discard:
                self._abandon(transfer)
        self._is_stalled = bool(late)

    def _abandon(self, transfer: Transfer) -> None:
        """Release the device pages of a copy. They may be overwritten, so its result is discarded. Its host pages stay
        allocated while the mover may write to them."""
        self.abandoned += sum(transfer.order.page_counts)
        self._give_back(transfer)
        self._transfers.let_go(transfer, self._discard)
        if transfer.order.number in self._copied:
            self._try_again(*self._copied.pop(transfer.order.number))

    def _discard(self, transfer: Transfer, outcome: Outcome) -> None:
        self._host.free(transfer.order.host, transfer.owner)
        for pages, keys in zip(self._host.pages, transfer.order.keys, strict=True):
            pages.arrived(keys)

    def portrait(self) -> list[tuple[int, bytes]]:
        """Return what waits, in order: the ends of prefixes, with the key of their last page."""
        evicted = [(0, key) for parts in self._rescued for keys, _ in parts for key in keys]
        waiting = [(node.end, node.keys[-1]) for line in (self._asked, self._waiting) for node in line]
        return [*waiting, *evicted]

    # -- for counting ---------------------------------------------------------------------------------

    def rescued_pages(self, group: int) -> Int32:
        """Return device pages that were evicted and are not in an order yet."""
        return np.concatenate([np.empty(0, np.int32), *(pages for _, pages in self._rescued[group])])

    @property
    def queued_pages(self) -> int:
        """Pages of nodes waiting to be examined, and of evictions waiting to be copied."""
        evicted = sum(len(self.rescued_pages(group)) for group in range(len(self._rescued)))
        return self._asked.page_count + self._waiting.page_count + evicted

    @property
    def rescue_owner(self) -> int:
        return owner.transfer(self._rescuer or 0)
