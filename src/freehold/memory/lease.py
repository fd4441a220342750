"""A lease: the KV of one running sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from freehold.contract.arrays import Int32, Int64
from freehold.memory.group import CacheGroup
from freehold.memory.ledger import owner
from freehold.memory.ledger.errors import LeaseError
from freehold.memory.ledger.pool import PagePool
from freehold.memory.page_tables import PageTables
from freehold.memory.prefix.node import Node, PinKind
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tails import Tail, TailTable


class Rows(Protocol):
    """The part of the lease table that a lease needs; documented there."""

    pools: list[PagePool]
    groups: Sequence[CacheGroup]
    tree: PrefixTree
    tails: TailTable
    page_tables: PageTables
    page_size: int
    shared: Int64
    committed: Int64
    reserved: Int64
    allocated: Int64
    fence: Int64
    slid: Int64
    checkpoints: Int64
    leases: list[Lease | None]

    def extend(self, rows: Int64, targets: Int64) -> None: ...

    def commit(self, rows: Int64, written: Int64, reserved: Int64) -> None: ...

    def close_row(self, row: int) -> None: ...


class Lease:
    """One sequence's row: the only way to hold device pages for it."""

    __slots__ = ("_table", "node", "row", "serial")

    def __init__(self, table: Rows, row: int, serial: int, node: Node):
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
        """Return each group's pages that cover positions start .. end (start on a page boundary), 0 where there is
        none."""
        size = self._table.page_size
        columns = slice(start // size, -(-end // size))
        return [table[self.row, columns] for table in self._open_table().page_tables.tables]

    def _free_private(self, start: int, end: int) -> None:
        """Free the private pages that cover positions start .. end."""
        table = self._open_table()
        for pool, pages in zip(table.pools, self.pages(start, end), strict=True):
            pool.free(pages[pages != 0] if table.tree.bounded else pages, self.owner, int(table.fence[self.row]))

    def keep_checkpoints(self, *boundaries: int) -> None:
        """Keep a prompt's states at these boundaries, at most two."""
        self._open_table().checkpoints[self.row, : len(boundaries)] = boundaries

    def extend(self, count: int) -> None:
        """Cover `count` tokens past the committed ones, in every group. Raise OutOfPages, having changed nothing."""
        row = np.array([self.row], np.int64)
        self._open_table().extend(row, self._table.committed[row] + count)

    def commit(self, count: int) -> None:
        """Commit `count` more tokens; the step that wrote them has completed."""
        table, row = self._open_table(), np.array([self.row])
        table.commit(row, table.committed[row] + count, table.reserved[row])

    def trim(self, to: int) -> None:
        """Free the whole pages past `to` tokens; what was written beyond is forgotten."""
        table = self._open_table()
        size = table.page_size
        if to < self.shared:
            raise LeaseError(f"cannot trim to {to}: the first {self.shared} tokens belong to the tree")
        keep = -(-to // size) * size
        if keep < self.allocated:
            self._free_private(keep, self.allocated)
            table.allocated[self.row] = keep
        table.committed[self.row] = min(self.committed, to)
        table.reserved[self.row] = min(self.reserved, to)

    def publish(self, tokens: Int32, priority: int = 0) -> int:
        """Give the KV of `[shared, floor_page(committed))` to the tree. Return the new `shared`.

        `tokens` are the sequence's; KV past their end is not given. Pages that the tree has already are freed and
        replaced by the tree's; the pin moves to the deepest node.
        """
        table = self._open_table()
        start, usable = self.shared, min(self.committed, len(tokens))
        end = usable - usable % table.page_size
        if end <= start:
            return start
        mine = self.pages(start, end)
        before, fence = self.node, int(table.fence[self.row])
        node, known = table.tree.insert(before, tokens[start:end], mine, self.owner, priority)
        if known:
            self._replace(before, node, known)
        for bounded in table.tree.bounded:
            bounded.borrow(self.pages(start, end)[bounded.number])
        table.tree.holds.repin(before, node, PinKind.LEASE, fence)
        self.node = node
        table.shared[self.row] = end
        return end

    def _replace(self, before: Node, node: Node, known: int) -> None:
        """Switch to the tree's pages for the first `known` tokens between two nodes, which the tree had already."""
        table, start = self._table, before.end
        fence = int(table.fence[self.row])
        for group, (pool, part) in enumerate(zip(table.pools, self.pages(start, start + known), strict=True)):
            theirs = table.tree.pages_after(before, node, group)[: len(part)]
            is_duplicate = (part != 0) & (part != theirs)
            pool.free(part[is_duplicate], self.owner, fence)
            table.page_tables.write(group, self.row, start // table.page_size, np.where(part != 0, theirs, 0))

    def adopt(self, tail: Tail) -> None:
        """Resume from a tail, which begins where the lease ends. Raise LeaseError, having changed nothing, if it does
        not, or is no longer parked."""
        table = self._open_table()
        if not tail.start == self.shared == self.allocated:
            raise LeaseError(f"a tail begins at {tail.start}, the lease has {self.shared} .. {self.allocated}")
        table.tails.take(tail, self.owner)
        for group, pages in enumerate(tail.pages):
            table.page_tables.write(group, self.row, tail.start // table.page_size, pages)
        table.fence[self.row] = max(int(table.fence[self.row]), tail.fence)
        table.allocated[self.row] += table.page_size
        table.committed[self.row] = table.reserved[self.row] = tail.end

    def park(self, name: str, tokens: Int32) -> None:
        """Park the tokens that do not fill a page as a tail under `name`, for the sequence to resume from. The lease
        stays open until released. A state that a step in flight may have advanced past the end is no tail."""
        table = self._open_table()
        start, end = self.shared, min(self.committed, len(tokens))
        is_exact = self.reserved <= end or not any(group.is_state for group in table.groups)
        if not (start < end < start + table.page_size and is_exact):
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
        """End the lease: free private pages, drop the pin, and return the row. Raise LeaseError the second time."""
        table = self._open_table()
        fence = int(table.fence[self.row])
        self._free_private(self.shared, self.allocated)
        for bounded in table.tree.bounded:
            slid = int(table.slid[bounded.number, self.row])
            bounded.give_back(self.pages(0, self.shared)[bounded.number][slid:], fence)
        table.tree.holds.unpin(self.node, PinKind.LEASE, fence)
        table.close_row(self.row)

    def withdraw(self) -> None:
        """End an unused lease: it holds no private page, and nothing was computed for it."""
        assert self.shared == self.allocated
        self._table.page_tables.forget(self.row)
        self.release()

    def use(self, priority: int = 0) -> None:
        """Count the shared prefix as used by a request that starts with this lease."""
        self._open_table().tree.use(self.node, priority)

    def _open_table(self) -> Rows:
        if self._table.leases[self.row] is not self:
            raise LeaseError(f"lease {self.serial} has been released")
        return self._table
