"""Storage: copying pages there from the host, and fetching them for waiting requests."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from freehold.contract.arrays import Int32, Int64
from freehold.contract.orders import Kind, Order, Outcome
from freehold.contract.prefix_keys import KeyChain, key_in_group
from freehold.memory.ledger import owner
from freehold.memory.prefix.node import Namespace
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tiers.backoff import Backoff
from freehold.memory.tiers.host import HostPages, HostTier
from freehold.memory.tiers.reach import Present, Reach
from freehold.memory.tiers.transfer import LATE_S, Transfer, TransferTable

PROBED_COLUMNS = 256  # per probe
FETCHED_PAGES = 64  # in one order, of each group
FETCHES_IN_FLIGHT = 4  # one for each thread. Waiting pieces own no pages.
STORED_PAGES = 64
ORDER_BYTES = 32 << 20  # per order, unless one page is larger: a slow store can do it before its deadline
STORES_IN_FLIGHT = 2
QUEUE_MAX = 16384  # pages; other owed pages are looked for when the queue is empty
PREFETCHES_MAX = 256
FETCHED_SHARE = 2  # half of the host may hold pages fetched for waiting requests
TIMEOUT_S = 1.0


class PrefetchPolicy(StrEnum):
    """How long a request waits for a prefetch from storage."""

    BEST_EFFORT = "best_effort"  # not at all: it uses what has arrived
    WAIT_COMPLETE = "wait_complete"  # until it completes, up to a fetch's deadline
    TIMEOUT = "timeout"  # at most TIMEOUT_S


_PATIENCE_S = {
    PrefetchPolicy.BEST_EFFORT: 0.0,
    PrefetchPolicy.WAIT_COMPLETE: LATE_S[Kind.FETCH],
    PrefetchPolicy.TIMEOUT: TIMEOUT_S,
}


@dataclass(eq=False)
class Prefetch:
    """Fetches a sequence's prefix from storage to the host: first storage is probed (`found`), then the pages are
    fetched in pieces. `was_there`: tokens available without it; `boundary`: with it. `wanted_by` counts requests that
    wait; at 0 no more is fetched, and an order in flight keeps its pages until it ends. `begun`: when its newest order
    began, in seconds of the scheduler's clock. `taken`: host pages of each group fetched for it, int64 [groups]."""

    namespace: Namespace
    keys: KeyChain
    begun: float
    found: Present
    was_there: int
    probed: int  # columns
    taken: Int64
    boundary: int = 0
    pieces: int = 0  # waiting or in flight
    wanted_by: int = 0
    is_cut: bool = False  # a piece was not fetched: later ones are useless
    is_over: bool = False


@dataclass
class Question:
    """Whether storage has some pages. `has_all` is None until it answers."""

    has_all: bool | None = None


class Storage:
    """Stores pages that reach the host, and fetches them by key. `group_keys`: the fingerprints of the groups;
    `page_bytes`: the sizes of their pages."""

    def __init__(
        self, policy: PrefetchPolicy, group_keys: Sequence[bytes], page_bytes: Sequence[int], tree: PrefixTree,
        host: HostTier, transfers: TransferTable, reach: Reach,
    ):  # fmt: skip
        self._policy = policy
        self._group_keys = group_keys
        self._pages_max = max(ORDER_BYTES // sum(page_bytes), 1)  # of each group in an order
        self._tree = tree
        self._host = host
        self._transfers = transfers
        self._reach = reach
        self._queue: OrderedDict[tuple[int, bytes], None] = OrderedDict()  # group and key
        self._owes_more = True  # pages owed that are not in the queue
        self._backoff = Backoff()
        self._is_detached = False
        self._known_from = 0  # pages moved by orders up to this number may be gone from storage
        self._underway: dict[bytes, Prefetch] = {}  # by the first key that device and host lack
        self._pieces: deque[tuple[Prefetch, list[Int64]]] = deque()  # waiting pieces, with their columns
        self._fetched_for: list[Prefetch] = []  # for requests that waited a moment ago
        self.has_news = True
        self.stored = self.fetched = self.dropped = 0  # pages
        host.leads_to_storage = True
        for pages in host.pages:
            pages.given.owe(pages.pool.pages_of(owner.ENTRY))
            pages.is_incomplete = True

    def detach(self) -> None:
        """Begin nothing more. Transfers in flight end as usual."""
        self._is_detached = True
        self._host.leads_to_storage = False
        self.forget_stored()

    def forget_stored(self) -> None:
        """Assume storage has lost all pages that are on the host or in flight. None is stored again unless
        asked for."""
        self._known_from = self._transfers.next_number()
        self._queue.clear()
        for pages in self._host.pages:
            pages.given.forget()

    # -- to storage -----------------------------------------------------------------------------------

    def enqueue(self, group: int, keys: Sequence[bytes]) -> None:
        """Queue pages that reached the host."""
        pages = self._host.pages[group]
        pages.given.owe(pages.pages_of(keys))
        room = QUEUE_MAX - len(self._queue)
        self._queue.update(dict.fromkeys((group, key) for key in keys[: max(room, 0)]))
        self._owes_more |= len(keys) > room
        self.has_news = True

    def begin(self) -> None:
        """Begin pending fetches and stores. Called in every iteration."""
        self.has_news = False
        self._fetch_next()
        while self._transfers.count(Kind.STORE) < STORES_IN_FLIGHT and self._has_next():
            chosen: list[list[bytes]] = [[] for _ in self._host.pages]
            for _ in range(min(STORED_PAGES, self._pages_max, len(self._queue))):
                (group, key), _ = self._queue.popitem(last=False)
                pages = self._host.pages[group]
                if pages.given.owed[pages.pages_of([key])[0]]:
                    chosen[group].append(key)
            if any(chosen):
                reads = [pages.hold(keys) for pages, keys in zip(self._host.pages, chosen, strict=True)]
                order = Order(self._transfers.next_number(), Kind.STORE, reads, keys=self._names(chosen))
                self._transfers.begin(order, self._stored, reads=reads)

    def _has_next(self) -> bool:
        """Return whether a page is queued. If none is, queue owed pages that did not fit before or failed to store."""
        may_look = self._owes_more and not self._is_detached and self._backoff.is_over(self._transfers.now)
        if not self._queue and may_look:
            for group, pages in enumerate(self._host.pages):
                keys = pages.keys_of(_to_store(pages)[:STORED_PAGES])
                self._queue.update(dict.fromkeys((group, key) for key in keys))
            self._owes_more = any(bool(pages.given.owed.any()) for pages in self._host.pages)
        return len(self._queue) > 0

    def _names(self, keys: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
        """Return the keys of each group's pages in storage."""
        return [[key_in_group(key, group) for key in part] for part, group in zip(keys, self._group_keys, strict=True)]

    def _stored(self, transfer: Transfer, outcome: Outcome) -> None:
        for pages, reads, whole in zip(self._host.pages, transfer.reads, outcome.whole, strict=True):
            pages.drop(reads)
            if transfer.order.number > self._known_from:
                pages.given.has(reads[whole])
            self.stored += int(np.count_nonzero(whole))
            self.dropped += int(np.count_nonzero(~whole))
        if all(whole.all() for whole in outcome.whole):
            self._backoff.succeeded()
        else:
            self._owes_more = True
            self._backoff.failed(self._transfers.now)

    @property
    def queued_pages(self) -> int:
        """Pages waiting to be stored."""
        return sum(len(_to_store(pages)) for pages in self._host.pages)

    def ask(self, keys: Sequence[Sequence[bytes]]) -> Question:
        """Ask storage whether it has the pages of these keys, for each group. Lost ones are stored again."""
        question = Question()

        def finish(transfer: Transfer, outcome: Outcome) -> None:
            is_known = outcome.error is None and transfer.order.number > self._known_from
            question.has_all = is_known and all(whole.all() for whole in outcome.whole)
            for group, (part, whole) in enumerate(zip(keys, outcome.whole, strict=True)):
                lost = [key for key, is_there in zip(part, whole, strict=True) if is_known and not is_there]
                self._host.pages[group].given.lacks(lost, self._host.pages[group].pages_of(lost))
                self.enqueue(group, lost)

        order = Order(self._transfers.next_number(), Kind.PROBE, (), keys=self._names(keys))
        self._transfers.begin(order, finish)
        return question

    # -- from storage ---------------------------------------------------------------------------------

    def prefetching(
        self, namespace: Namespace, keys: KeyChain, limit: int, now: float
    ) -> Generator[None, None, Prefetch | None]:
        """Fetch what storage has of a sequence; arguments and result as for `looking_up`."""
        prefetch = yield from self.looking_up(namespace, keys, limit, now)
        if prefetch is not None:
            self.join(prefetch)
        return prefetch

    def looking_up(
        self, namespace: Namespace, keys: KeyChain, limit: int, now: float
    ) -> Generator[None, None, Prefetch | None]:
        """Find, in slices, the prefetch for at most `limit` tokens of a sequence. Return it to be joined; it may be
        under way for another sequence. Return None if nothing is lacking, or if storage is too busy. Moves nothing.
        `now`: seconds of the scheduler's clock, as the last iteration may be long ago."""
        self._transfers.now = now
        match = self._tree.match(namespace, keys.tokens, limit)
        on_device, on_host = yield from self._reach.looking(match, keys, limit)
        columns, there = min(limit // self._tree.page_size, len(keys)), len(on_device[0])
        was_there = self._reach.boundary(on_device, on_host)
        first = was_there // self._tree.page_size
        if first >= columns:
            return None
        prefetch = self._underway.get(keys[first])
        if prefetch is None and len(self._underway) >= PREFETCHES_MAX:
            return None
        if prefetch is None:
            found = [np.zeros(columns, np.bool_) for _ in self._host.pages]
            prefetch = Prefetch(
                namespace, keys, self._transfers.now, found, was_there, there if self._reach.full else 0,
                np.zeros(len(self._host.pages), np.int64),
            )  # fmt: skip
        return prefetch

    def join(self, prefetch: Prefetch) -> None:
        """Count a request that wants the prefetch. Begin it if it is not under way."""
        key = self._key(prefetch)
        if key not in self._underway:
            self._underway[key] = prefetch
            self._go_on(prefetch)
        prefetch.wanted_by += 1

    def is_coming(self, prefetch: Prefetch) -> bool:
        """Return whether the prefetch is under way and not late."""
        return not prefetch.is_over and self._transfers.now - prefetch.begun <= LATE_S[Kind.FETCH]

    @property
    def patience(self) -> float:
        """Seconds that a request waits for a prefetch."""
        return _PATIENCE_S[self._policy]

    def _go_on(self, prefetch: Prefetch) -> None:
        """Probe storage for the next columns; once all are probed, fetch."""
        end = min(prefetch.probed + PROBED_COLUMNS, len(prefetch.found[0]))
        if prefetch.probed == end:
            self._fetch(prefetch)
            return
        asked = np.arange(prefetch.probed, end)
        keys = self._names([prefetch.keys.at(asked.tolist()) for _ in self._host.pages])
        order = Order(self._transfers.next_number(), Kind.PROBE, (), keys=keys)
        prefetch.begun = self._transfers.now
        self._transfers.begin(order, lambda _, outcome: self._probed(prefetch, asked, outcome))

    def _probed(self, prefetch: Prefetch, asked: Int64, outcome: Outcome) -> None:
        for found, whole in zip(prefetch.found, outcome.whole, strict=True):
            found[asked] = whole
        prefetch.probed = int(asked[-1]) + 1
        holes = [np.flatnonzero(~outcome.whole[group]) for group in self._reach.full]
        ends = [int(asked[part[0]]) for part in holes if len(part)]
        if outcome.error is not None:
            ends.append(int(asked[0]))
        if ends:  # nothing behind the first column that a full group lacks counts
            prefetch.probed = min(ends)
            prefetch.found = [found[: prefetch.probed] for found in prefetch.found]
        is_wanted = prefetch.wanted_by > 0 and not self._is_detached
        if is_wanted and prefetch.namespace.weights == self._tree.weights:
            self._go_on(prefetch)
        else:
            self._end(prefetch)

    def _fetch(self, prefetch: Prefetch) -> None:
        """Queue pieces with only the pages needed to resume from the longest boundary."""
        keys, columns = prefetch.keys, len(prefetch.found[0])
        match = self._tree.match(prefetch.namespace, keys.tokens, columns * self._tree.page_size)
        on_device = self._reach.on_device(match, columns)
        on_host = self._reach.on_host(keys, on_device)
        prefetch.boundary = self._reach.boundary(on_device, on_host, prefetch.found)
        if prefetch.boundary > prefetch.was_there:
            lacking = [found & ~(one | two) for found, one, two in zip(prefetch.found, on_device, on_host, strict=True)]
            wanted = self._reach.needed(prefetch.boundary, lacking)
            size = min(FETCHED_PAGES, self._pages_max)
            for at in range(0, max(len(part) for part in wanted), size):
                self._pieces.append((prefetch, [part[at : at + size] for part in wanted]))
                prefetch.pieces += 1
        if prefetch.pieces == 0:
            self._end(prefetch)
        self._fetch_next()

    def _fetch_next(self) -> None:
        """Begin waiting pieces. Pieces behind one that was not fetched are useless."""
        while self._pieces:
            prefetch, columns = self._pieces[0]
            is_wanted = prefetch.wanted_by > 0 and not self._is_detached and not prefetch.is_cut
            if is_wanted and (self._fetches >= FETCHES_IN_FLIGHT or not self._has_room(prefetch, columns)):
                return
            self._pieces.popleft()
            if not is_wanted or not self._fetch_piece(prefetch, columns):
                prefetch.is_cut = True
                self._piece_ended(prefetch)

    def _has_room(self, prefetch: Prefetch, columns: Sequence[Int64]) -> bool:
        """Return True if the piece fits beside pages fetched for other waiting requests, or there are none."""
        self._fetched_for = [one for one in self._fetched_for if one.wanted_by > 0]
        others = [one.taken for one in self._fetched_for if one is not prefetch]
        taken = sum(others, prefetch.taken + [len(part) for part in columns])
        capacity = np.array([pages.pool.capacity for pages in self._host.pages])
        return not others or bool((taken * FETCHED_SHARE <= capacity).all())

    @property
    def _fetches(self) -> int:
        """Fetches in flight, except late ones, for which no request waits."""
        return sum(one.order.kind is Kind.FETCH and not self._transfers.is_late(one) for one in self._transfers)

    def _piece_ended(self, prefetch: Prefetch) -> None:
        prefetch.pieces -= 1
        if prefetch.pieces == 0:
            self._end(prefetch)

    def _fetch_piece(self, prefetch: Prefetch, columns: Sequence[Int64]) -> bool:
        """Begin to fetch a piece. Return whether there was room."""
        number = self._transfers.next_number()
        by = owner.transfer(number)
        host = [pages.allocate(len(part), by) for pages, part in zip(self._host.pages, columns, strict=True)]
        if any(len(pages) < len(part) for pages, part in zip(host, columns, strict=True)):
            self._host.free(host, by)
            return False
        keys = [prefetch.keys.at(part.tolist()) for part in columns]
        prefetch.begun = self._transfers.now
        prefetch.taken += [len(part) for part in columns]
        if prefetch not in self._fetched_for:
            self._fetched_for.append(prefetch)
        for pages, part in zip(self._host.pages, columns, strict=True):
            if pages.events is not None:
                pages.events.fetched(prefetch.keys, part)

        def finish(transfer: Transfer, outcome: Outcome) -> None:
            self._fetched(prefetch, keys, transfer, outcome)

        self._transfers.begin(Order(number, Kind.FETCH, host, keys=self._names(keys)), finish, host=host)
        return True

    def _fetched(
        self, prefetch: Prefetch, keys: Sequence[Sequence[bytes]], transfer: Transfer, outcome: Outcome
    ) -> None:
        """Make the pages that arrived whole findable."""
        are_stored = transfer.order.number > self._known_from
        prefix = prefetch.keys.at(range(prefetch.boundary // self._tree.page_size))
        for pages, host, names, whole in zip(self._host.pages, transfer.host, keys, outcome.whole, strict=True):
            self.fetched += len(pages.settle(names, host, whole, transfer.owner, are_stored))
            pages.touch(prefix)
        self._piece_ended(prefetch)
        self._fetch_next()

    def _end(self, prefetch: Prefetch) -> None:
        prefetch.is_over = True
        del self._underway[self._key(prefetch)]

    def _key(self, prefetch: Prefetch) -> bytes:
        """Return the key of the first column that device and host lack."""
        return prefetch.keys[prefetch.was_there // self._tree.page_size]


def _to_store(pages: HostPages) -> Int32:
    """Return pages owed to storage that no transfer reads, int32 [n]."""
    return np.flatnonzero(pages.given.owed & (pages.readers == 0)).astype(np.int32)
