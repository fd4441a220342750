"""Leases: the KV of running sequences.

    positions    0 ........ shared ........ committed ........ reserved ........ allocated
                 |  tree's  |    private, written   |  steps in flight  |  excess  |

The tree owns the pages below `shared` and the lease has them pinned; the lease owns the rest. All four
numbers are recorded, never inferred: `0 <= shared <= committed <= reserved <= allocated`. Excess is what
drafts left that were not accepted: the next step uses it, or it is given back under pressure.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from freehold.arrays import Int32, Int64
from freehold.memory.ledger import owner
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.ledger.errors import LeaseError, OutOfPages
from freehold.memory.ledger.pool import PagePool
from freehold.memory.prefix.node import Match, Node, PinKind
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tails import TailTable


def pages_to_cover(tokens: Int64, page_size: int) -> Int64:
    """Pages that hold `tokens` tokens."""
    return (tokens + (page_size - 1)) // page_size


class LeaseTable:
    """The open leases as rows of NumPy arrays, so that a step's bookkeeping is vectorised.

    shared, committed, reserved, allocated, fence int64 [rows] · page_tables: a group's int32 [rows, pages].
    Every write to a page table is also logged for the engine, which keeps a copy (`take_updates`).
    """

    def __init__(
        self,
        pools: list[PagePool],
        tree: PrefixTree,
        tails: TailTable,
        epochs: Epochs,
        row_count: int,
        token_limit: int,
    ):
        self.pools = pools
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
        width = -(-token_limit // self.page_size)
        self.page_tables: list[Int32] = [np.zeros((row_count, width), np.int32) for _ in pools]
        self.leases: list[Lease | None] = [None] * row_count
        self._free_rows = list(range(row_count - 1, -1, -1))
        # A row is in use by the steps in flight just as a page is, so it waits for its fence too.
        self._limbo_rows: deque[tuple[int, int]] = deque()
        self._updates: list[tuple[int, Int32, Int32, Int32]] = []
        self._serial = 0

    @property
    def free_row_count(self) -> int:
        return len(self._free_rows)

    @property
    def limbo_rows(self) -> list[tuple[int, int]]:
        """(fence, row) of rows that a step in flight still uses."""
        return list(self._limbo_rows)

    @property
    def open_leases(self) -> list[Lease]:
        return [lease for lease in self.leases if lease is not None]

    def open(self, match: Match) -> Lease:
        """Lease a row that starts with the matched prefix, which is pinned. It holds no private pages.

        Raises LeaseError if no row is free or the match is stale.
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
        self._write_path(row, node)
        return lease

    def _write_path(self, row: int, node: Node) -> None:
        path = self.tree.path(node)
        for group in range(len(self.pools)):
            parts = [part.pages[group] for part in path]
            if parts:
                self.write_pages(group, row, 0, np.concatenate(parts))

    def write_pages(self, group: int, row: int, column: int, pages: Int32) -> None:
        self.page_tables[group][row, column : column + len(pages)] = pages
        columns = np.arange(column, column + len(pages), dtype=np.int32)
        self._updates.append((group, np.full(len(pages), row, np.int32), columns, pages))

    def take_updates(self) -> list[tuple[Int32, Int32, Int32]]:
        """For each group, the (rows, columns, pages) written since the last call, in order."""
        updates, self._updates = self._updates, []
        taken: list[tuple[Int32, Int32, Int32]] = []
        for group in range(len(self.pools)):
            mine = [update[1:] for update in updates if update[0] == group]
            if len(mine) == 1:
                taken.append(mine[0])
            elif mine:
                rows, columns, pages = (np.concatenate(parts) for parts in zip(*mine, strict=True))
                taken.append((rows, columns, pages))
            else:
                none = np.empty(0, np.int32)
                taken.append((none, none, none))
        return taken

    # -- one formula: what a step needs ---------------------------------------------------------------

    def lacking(self, rows: Int64, targets: Int64) -> tuple[Int64, Int64]:
        """Those of `rows` [n] that lack pages to cover `targets` [n] tokens, and how many in every group.
        Admission, eviction and allocation all ask here."""
        short = (targets > self.allocated[rows]).nonzero()[0]
        if len(short) == 0:
            return short, short
        rows = rows[short]
        return rows, pages_to_cover(targets[short] - self.allocated[rows], self.page_size)

    def extend(self, rows: Int64, targets: Int64) -> None:
        """Reserve `targets` [n] tokens of the leases in `rows` [n], in every group.

        All of it, or OutOfPages and nothing changed.
        """
        short, counts = self.lacking(rows, targets)
        if len(short):
            if (targets > self.token_limit).any():
                raise LeaseError(f"a lease holds at most {self.token_limit} tokens")
            self._allocate(short, counts)
        self.reserved[rows] = np.maximum(self.reserved[rows], targets)

    def _allocate(self, rows: Int64, counts: Int64) -> None:
        """`counts` [n] more pages for `rows` [n], in every group; all or none."""
        total, first = int(counts.sum()), self.allocated[rows] // self.page_size
        scarce = next((pool for pool in self.pools if pool.free_count < total), None)
        if scarce is not None:
            raise OutOfPages(f"{total} pages asked for, {scarce.free_count} of {scarce.capacity} free")
        page_rows = rows.repeat(counts)
        columns = (np.arange(total) + (first - counts.cumsum() + counts).repeat(counts)).astype(np.int32)
        for group, pool in enumerate(self.pools):
            pages = pool.allocate(self.owner[page_rows])
            self.page_tables[group][page_rows, columns] = pages
            self._updates.append((group, page_rows.astype(np.int32), columns, pages))
        self.allocated[rows] += counts * self.page_size

    def submit(self, rows: Int64, step: int) -> None:
        """Step `step` reads and writes the pages of `rows`: none of them is free before it is done."""
        self.fence[rows] = step

    def commit(self, rows: Int64, written: Int64, reserved: Int64) -> None:
        """A step has completed: the first `written` [n] tokens of `rows` [n] have their KV in every group,
        and the steps still in flight write at most up to `reserved` [n]."""
        was_reserved = self.reserved[rows]
        if np.count_nonzero((written < self.committed[rows]) | (written > was_reserved)):
            raise LeaseError("committed tokens that no step had reserved")
        if np.count_nonzero((reserved < written) | (reserved > was_reserved)):
            raise LeaseError("a completed step can only lower what is reserved")
        self.committed[rows] = written
        self.reserved[rows] = reserved

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
        """Called by the lease that ends."""
        self.leases[row] = None
        self.owner[row] = 0
        for column in (self.shared, self.committed, self.reserved, self.allocated):
            column[row] = 0
        self._limbo_rows.append((int(self.fence[row]), row))
        self.collect()


class Lease:
    """One sequence's row. The only way to hold device pages for it."""

    __slots__ = ("_table", "node", "row", "serial")

    def __init__(self, table: LeaseTable, row: int, serial: int, node: Node):
        self._table = table
        self.row = row
        self.serial = serial
        self.node = node  # ends where `shared` ends, and is pinned

    @property
    def owner(self) -> int:
        return owner.lease(self.serial)

    @property
    def is_open(self) -> bool:
        return self._table.leases[self.row] is self

    @property
    def shared(self) -> int:
        return int(self._open_table().shared[self.row])

    @property
    def committed(self) -> int:
        return int(self._open_table().committed[self.row])

    @property
    def reserved(self) -> int:
        return int(self._open_table().reserved[self.row])

    @property
    def allocated(self) -> int:
        return int(self._open_table().allocated[self.row])

    def pages(self, start: int, end: int) -> list[Int32]:
        """Per group, the pages that cover positions start .. end (start on a page boundary)."""
        size = self._table.page_size
        columns = slice(start // size, -(-end // size))
        return [table[self.row, columns] for table in self._open_table().page_tables]

    def extend(self, count: int) -> None:
        """Cover `count` tokens past the committed ones, in every group, or OutOfPages and no change."""
        row = np.array([self.row], np.int64)
        self._open_table().extend(row, self._table.committed[row] + count)

    def commit(self, count: int) -> None:
        """`count` more tokens were written: the step that wrote them has completed."""
        table, row = self._open_table(), np.array([self.row])
        table.commit(row, table.committed[row] + count, table.reserved[row])

    def trim(self, to: int) -> None:
        """Give back the whole pages past `to` tokens; what was written past it is forgotten."""
        table = self._open_table()
        size = table.page_size
        if to < self.shared:
            raise LeaseError(f"cannot trim to {to}: the first {self.shared} tokens belong to the tree")
        keep = -(-to // size) * size
        if keep < self.allocated:
            for pool, pages in zip(table.pools, self.pages(keep, self.allocated), strict=True):
                pool.free(pages, self.owner, int(table.fence[self.row]))
            table.allocated[self.row] = keep
        table.committed[self.row] = min(self.committed, to)
        table.reserved[self.row] = min(self.reserved, to)

    def publish(self, tokens: Int32, priority: int = 0) -> int:
        """Give the KV of `[shared, floor_page(committed))` to the tree -> the new `shared`.

        `tokens` are the sequence's; KV of tokens that the sequence ended before is not given. Pages that
        the tree has already are freed and replaced by the tree's; the pin moves to the deepest node.
        """
        table = self._open_table()
        start, usable = self.shared, min(self.committed, len(tokens))
        end = usable - usable % table.page_size
        if end <= start:
            return start
        mine = self.pages(start, end)
        node, known = table.tree.insert(self.node, tokens[start:end], mine, self.owner, priority)
        fence = int(table.fence[self.row])
        if known:
            self._replace(node, start, known, mine, fence)
        table.tree.holds.repin(self.node, node, PinKind.LEASE, fence)
        self.node = node
        table.shared[self.row] = end
        return end

    def _replace(self, node: Node, start: int, known: int, mine: list[Int32], fence: int) -> None:
        """The first `known` of the tokens from `start` were in the tree before: use its pages."""
        table = self._table
        count = known // table.page_size
        path = table.tree.path(node)
        for group, pool in enumerate(table.pools):
            theirs = np.concatenate([part.pages[group] for part in path])
            first = start // table.page_size
            pool.free(mine[group][:count].copy(), self.owner, fence)
            table.write_pages(group, self.row, first, theirs[first : first + count])

    def adopt(self, name: str) -> None:
        """Take up the tail parked under `name`, which begins where the lease ends."""
        table = self._open_table()
        tail = table.tails.take(name, self.owner)
        assert tail.start == self.shared == self.allocated, "a tail continues the match"
        for group, pages in enumerate(tail.pages):
            table.write_pages(group, self.row, tail.start // table.page_size, pages)
        table.fence[self.row] = max(int(table.fence[self.row]), tail.fence)
        table.allocated[self.row] += table.page_size
        table.committed[self.row] = table.reserved[self.row] = tail.end

    def park(self, name: str, tokens: Int32) -> None:
        """Leave what does not fill a page as a tail under `name`, for the sequence to go on from. The lease
        stays open: it is released next."""
        table = self._open_table()
        start, end = self.shared, min(self.committed, len(tokens))
        if not start < end < start + table.page_size:
            table.tails.forget(name)
            return
        fence = int(table.fence[self.row])
        namespace = self.node.namespace
        self.trim(end)
        pages = self.pages(start, self.allocated)
        table.tails.park(name, namespace, start, tokens[:end], pages, self.owner, fence)
        for column in (table.committed, table.reserved, table.allocated):
            column[self.row] = start

    def release(self) -> None:
        """The single end: private pages are freed, the pin is dropped, the row is given back. Raises LeaseError
        the second time."""
        table = self._open_table()
        fence = int(table.fence[self.row])
        for pool, pages in zip(table.pools, self.pages(self.shared, self.allocated), strict=True):
            pool.free(pages, self.owner, fence)
        table.tree.holds.unpin(self.node, PinKind.LEASE, fence)
        table.close_row(self.row)

    def withdraw(self) -> None:
        """The lease is not wanted after all: it holds no private page, and nothing was computed for it."""
        assert self.shared == self.allocated
        self.release()

    def use(self, priority: int = 0) -> None:
        """A request starts with this lease: what it found in the tree counts as used."""
        self._open_table().tree.use(self.node, priority)

    def _open_table(self) -> LeaseTable:
        if self._table.leases[self.row] is not self:
            raise LeaseError(f"lease {self.serial} has been released")
        return self._table
