"""The open leases as rows of NumPy arrays.

    positions    0 ........ shared ........ committed ........ reserved ........ allocated
                 |  tree's  |    private, written   |  steps in flight  |  excess  |

The tree owns the pages below `shared`; the lease owns the rest. All four numbers are recorded, never inferred: `0 <=
shared <= committed <= reserved <= allocated`. Excess is left by rejected drafts: the next step uses it, or it is freed
under pressure.

In full groups every column below `allocated` has a page, and the lease pins the tree's pages. In bounded groups columns
below `slid` have none: no later step reads them. From `slid` on the lease borrows the tree's pages one by one. State
groups have pages only in some columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from freehold.contract.arrays import Bool, Int32, Int64, ragged
from freehold.memory.group import CHECKPOINTS, CacheGroup
from freehold.memory.lease import Lease
from freehold.memory.ledger import owner
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.ledger.errors import LeaseError, OutOfPages
from freehold.memory.ledger.pool import PagePool
from freehold.memory.page_tables import PageTables
from freehold.memory.prefix.node import Match, PinKind
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tails import TailTable

NO_CHECKPOINT = -1


def pages_to_cover(tokens: Int64, page_size: int) -> Int64:
    """Return how many page columns hold `tokens` tokens."""
    return (tokens + (page_size - 1)) // page_size


class Shortage(NamedTuple):
    """Pages that `rows` [n] lack to cover their targets: `columns` [n] each, and `pages` in total for each group.
    `states` [sum of columns] says which columns get a page of state groups; None without such groups."""

    rows: Int64
    columns: Int64
    pages: list[int]
    states: Bool | None


class LeaseTable:
    """Open leases, one per row. The bookkeeping of a step is vectorised over its rows.

    shared, committed, reserved, allocated, fence int64 [rows] · slid int64 [groups, rows] · checkpoints int64 [rows,
    2]: boundaries at which a prompt's state is kept.
    """

    def __init__(
        self,
        pools: list[PagePool],
        groups: Sequence[CacheGroup],
        tree: PrefixTree,
        tails: TailTable,
        epochs: Epochs,
        row_count: int,
        token_limit: int,
        checkpoint_interval: int = 0,
    ):
        self.pools = pools
        self.groups = groups
        self.tree = tree
        self.tails = tails
        self.epochs = epochs
        self.page_size = pools[0].page_size
        self.row_count = row_count
        self.token_limit = token_limit
        self.shared: Int64 = np.zeros(row_count, np.int64)
        self.committed: Int64 = np.zeros(row_count, np.int64)
        self.reserved: Int64 = np.zeros(row_count, np.int64)
        self.allocated: Int64 = np.zeros(row_count, np.int64)
        self.fence: Int64 = np.zeros(row_count, np.int64)
        self.owner: Int64 = np.zeros(row_count, np.int64)  # 0 while the row is free
        self.slid: Int64 = np.zeros((len(pools), row_count), np.int64)  # columns
        self.checkpoints: Int64 = np.full((row_count, CHECKPOINTS), NO_CHECKPOINT, np.int64)
        self.page_tables = PageTables(len(pools), row_count, -(-token_limit // self.page_size))
        self.leases: list[Lease | None] = [None] * row_count
        self._checkpoint_interval = checkpoint_interval
        self._has_states = any(group.is_state for group in groups)
        self._nothing = [0] * len(pools)
        self._free_rows = list(range(row_count - 1, -1, -1))
        # Steps in flight use a row just as they use a page, so it waits for its fence too.
        self._limbo_rows: deque[tuple[int, int]] = deque()
        self._serial = 0

    @property
    def free_row_count(self) -> int:
        return len(self._free_rows)

    @property
    def free_rows(self) -> list[int]:
        """Free rows, for the audit."""
        return self._free_rows

    @property
    def limbo_rows(self) -> list[tuple[int, int]]:
        """(fence, row) of rows that a step in flight still uses."""
        return list(self._limbo_rows)

    @property
    def open_leases(self) -> list[Lease]:
        return [lease for lease in self.leases if lease is not None]

    def in_rows(self, rows: Int64) -> list[Lease]:
        """Return the leases in `rows` [n], all open."""
        found: list[Lease] = []
        for row in rows:
            lease = self.leases[int(row)]
            assert lease is not None
            found.append(lease)
        return found

    def open(self, match: Match) -> Lease:
        """Lease a row that starts with the matched prefix. Pin the prefix, and borrow the pages that bounded groups
        need. The lease holds no private pages.

        Raise LeaseError if no row is free or the match is stale.
        """
        if not self._free_rows:
            raise LeaseError("no free row for a lease")
        node = self.tree.holds.pin(match, PinKind.LEASE)
        row = self._free_rows.pop()
        self._serial += 1
        lease = Lease(self, row, self._serial, node)
        self.leases[row] = lease
        self.owner[row] = owner.lease(self._serial)
        for column in (self.shared, self.committed, self.reserved, self.allocated):
            column[row] = match.length
        self.fence[row] = 0
        self.checkpoints[row] = NO_CHECKPOINT
        self._write_path(lease)
        return lease

    def _write_path(self, lease: Lease) -> None:
        path = self.tree.path(lease.node)
        if not path:
            self.slid[:, lease.row] = 0
            return
        pages = [np.concatenate([part.pages[number] for part in path]) for number in range(len(self.groups))]
        for bounded in self.tree.bounded:
            own, first = pages[bounded.number], bounded.group.first_column(lease.node.end, self.page_size)
            own[:first] = 0  # a copy of the tree's
            self.slid[bounded.number, lease.row] = first
            bounded.borrow(own[first:])
        self.page_tables.begin(lease.row, pages)

    def row_pages(self, row: int, group: int) -> Int32:
        """Return the pages of a row below `allocated`, int32 [columns] (a view)."""
        return self.page_tables.tables[group][row, : self.allocated[row] // self.page_size]

    # -- one formula: what a step needs ---------------------------------------------------------------

    def lacking(self, rows: Int64, targets: Int64, decodes: Bool | None = None) -> Shortage:
        """Return what `rows` [n] lack to cover `targets` [n] tokens. Admission, eviction and allocation all use this.

        A decoding row keeps a state in every column it enters. A prompt chunk, where `decodes` [n] is False, keeps one
        only at its end and at checkpoints.
        """
        short = (targets > self.allocated[rows]).nonzero()[0]
        if len(short) == 0:
            return Shortage(short, short, self._nothing, None)
        rows = rows[short]
        allocated = self.allocated[rows]
        columns = pages_to_cover(targets[short] - allocated, self.page_size)
        if not self._has_states:
            return Shortage(rows, columns, [int(columns.sum())] * len(self.pools), None)
        is_decoding = np.ones(len(rows), np.bool_) if decodes is None else decodes[short]
        states = self._state_columns(allocated, columns, is_decoding, self.checkpoints[rows])
        return Shortage(rows, columns, self._by_group(columns, states), states)

    def needs_of_a_row(self, covered: int, target: int, checkpoints: Sequence[int]) -> list[int]:
        """Return the pages of each group that a new row needs to cover a prompt up to `target`, if its first `covered`
        tokens have pages. This is what `lacking` will return once the row is leased with these checkpoints."""
        columns = pages_to_cover(np.array([max(target - covered, 0)]), self.page_size)
        if not self._has_states:
            return [int(columns[0])] * len(self.pools)
        is_decoding = np.zeros(1, np.bool_)
        states = self._state_columns(np.array([covered]), columns, is_decoding, np.array([checkpoints], np.int64))
        return self._by_group(columns, states)

    def _by_group(self, columns: Int64, states: Bool) -> list[int]:
        total, count = int(columns.sum()), int(np.count_nonzero(states))
        return [count if group.is_state else total for group in self.groups]

    def _state_columns(self, allocated: Int64, counts: Int64, decodes: Bool, checkpoints: Int64) -> Bool:
        """Return which of the next `counts` [n] columns get a state [sum of counts]. The rows cover `allocated` [n]
        tokens and keep states at `checkpoints` [n, k]."""
        sequence, offset = ragged(counts)
        ends = allocated[sequence] + (offset + 1) * self.page_size
        is_last = offset == counts[sequence] - 1
        is_checkpoint = (checkpoints[sequence] == ends[:, None]).any(axis=1)
        if self._checkpoint_interval:
            is_checkpoint |= ends % self._checkpoint_interval == 0
        return is_last | decodes[sequence] | is_checkpoint

    def extend(self, rows: Int64, targets: Int64, decodes: Bool | None = None) -> None:
        """Reserve `targets` [n] tokens of the leases in `rows` [n], in every group; `decodes` as in `lacking`.

        Raise OutOfPages, having changed nothing, if pages are short.
        """
        shortage = self.lacking(rows, targets, decodes)
        if len(shortage.rows):
            if (targets > self.token_limit).any():
                raise LeaseError(f"a lease holds at most {self.token_limit} tokens")
            self._allocate(shortage)
        self.reserved[rows] = np.maximum(self.reserved[rows], targets)

    def _allocate(self, shortage: Shortage) -> None:
        """Allocate all of it or nothing."""
        rows, counts, needed, states = shortage
        for pool, count in zip(self.pools, needed, strict=True):
            if pool.free_count < count:
                raise OutOfPages(f"{count} pages asked for, {pool.free_count} of {pool.capacity} free")
        total, first = int(counts.sum()), self.allocated[rows] // self.page_size
        page_rows = rows.repeat(counts)
        columns = np.arange(total) + (first - counts.cumsum() + counts).repeat(counts)
        owners = self.owner[page_rows]
        for number, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            if group.is_state:
                assert states is not None
                # Explicit zeros: otherwise the engine keeps a state where the row's last user had a page.
                pages = np.zeros(total, np.int32)
                pages[states] = pool.allocate(owners[states])
            else:
                pages = pool.allocate(owners)
            self.page_tables.scatter(number, page_rows, columns, pages)
        self.allocated[rows] += counts * self.page_size

    def submit(self, rows: Int64, step: int) -> None:
        """Note that `step` reads and writes the pages of `rows`: none is free before it completes."""
        self.fence[rows] = step

    def commit(self, rows: Int64, written: Int64, reserved: Int64) -> None:
        """Process a completed step: the first `written` [n] tokens of `rows` [n] have KV in every group. Steps still in
        flight write at most up to `reserved` [n]."""
        was_reserved = self.reserved[rows]
        if np.count_nonzero((written < self.committed[rows]) | (written > was_reserved)):
            raise LeaseError("committed tokens that no step had reserved")
        if np.count_nonzero((reserved < written) | (reserved > was_reserved)):
            raise LeaseError("a completed step can only lower what is reserved")
        self.committed[rows] = written
        self.reserved[rows] = reserved

    # -- giving back ----------------------------------------------------------------------------------

    def slide(self, rows: Int64) -> None:
        """Give back pages that no later step of `rows` [n] reads. The window is measured from the last page boundary,
        not from `committed`, so that this boundary can be published with all it needs, however the request ends.

        Called when a step is planned. A request may end inside a verification, just after the previous commit, so
        between a commit and the handling of its tokens would be too early.
        """
        for bounded in self.tree.bounded:
            number, slid = bounded.number, self.slid[bounded.number]
            boundary = self.committed[rows] // self.page_size * self.page_size
            first = bounded.group.first_column(boundary, self.page_size)
            moved = (first > slid[rows]).nonzero()[0]
            if len(moved) == 0:
                continue
            mine, until = rows[moved], first[moved]
            sequence, offset = ragged(until - slid[mine])
            page_rows, columns = mine[sequence], slid[mine][sequence] + offset
            pages = self.page_tables.tables[number][page_rows, columns]
            is_private = columns * self.page_size >= self.shared[page_rows]
            bounded.give_back(pages[~is_private], self.fence[page_rows[~is_private]])
            there = is_private & (pages != 0)
            self._free(bounded.pool, pages[there], page_rows[there])
            self.page_tables.scatter(number, page_rows, columns, np.zeros(len(columns), np.int32))
            slid[mine] = until

    def _free(self, pool: PagePool, pages: Int32, rows: Int64) -> None:
        """Free private `pages` [n] of `rows` [n]."""
        fences = self.fence[rows]
        for fence in np.unique(fences).tolist():
            at = fences == fence
            pool.free(pages[at], self.owner[rows[at]], fence)

    def give_back_excess(self) -> None:
        """Free the pages that rejected drafts left behind the reserved tokens."""
        kept = pages_to_cover(self.reserved, self.page_size) * self.page_size
        for row in np.flatnonzero(self.allocated > kept).tolist():
            lease = self.leases[row]
            assert lease is not None
            lease.trim(int(self.reserved[row]))

    def collect(self) -> None:
        """Free the rows whose last step has completed."""
        while self._limbo_rows and self.epochs.passed(self._limbo_rows[0][0]):
            self._free_rows.append(self._limbo_rows.popleft()[1])

    def close_row(self, row: int) -> None:
        """Close the row of a lease that ends."""
        self.leases[row] = None
        self.owner[row] = 0
        for column in (self.shared, self.committed, self.reserved, self.allocated):
            column[row] = 0
        self._limbo_rows.append((int(self.fence[row]), row))
        self.collect()
