"""Page tables: the page of each row and column, and a log of writes."""

from __future__ import annotations

import numpy as np

from freehold.contract.arrays import Int32, Int64

PageWrites = tuple[Int32, Int32, Int32]  # (rows, columns, pages), all [n]


class PageTables:
    """A table int32 [rows, columns] for each cache group, 0 where there is no page. Every write is also logged for the
    engine, which keeps a copy (`take_updates`)."""

    def __init__(self, group_count: int, row_count: int, column_count: int):
        self.tables: list[Int32] = [np.zeros((row_count, column_count), np.int32) for _ in range(group_count)]
        self._log: list[list[PageWrites]] = [[] for _ in self.tables]

    def begin(self, row: int, pages: list[Int32]) -> None:
        """Write the first columns of a row: `pages` [n] of each group."""
        count = len(pages[0])
        rows, columns = np.full(count, row, np.int32), np.arange(count, dtype=np.int32)
        for table, log, own in zip(self.tables, self._log, pages, strict=True):
            table[row, :count] = own
            log.append((rows, columns, own))

    def write(self, group: int, row: int, column: int, pages: Int32) -> None:
        """Write `pages` [n] of one row, from a column on."""
        columns = np.arange(column, column + len(pages), dtype=np.int32)
        self.tables[group][row, column : column + len(pages)] = pages
        self._log[group].append((np.full(len(pages), row, np.int32), columns, pages))

    def scatter(self, group: int, rows: Int64, columns: Int64, pages: Int32) -> None:
        """Write `pages` [n] at any places."""
        self.tables[group][rows, columns] = pages
        self._log[group].append((rows.astype(np.int32), columns.astype(np.int32), pages))

    def forget(self, row: int) -> None:
        """Drop the unsent writes of a row: its lease is withdrawn, and no step will use them."""
        for log in self._log:
            log[:] = [write for write in log if (write[0] != row).any()]

    def take_updates(self) -> list[PageWrites]:
        """Return and clear the writes of each group since the last call, in order."""
        log, self._log = self._log, [[] for _ in self.tables]
        taken: list[PageWrites] = []
        for writes in log:
            if len(writes) == 1:
                taken.append(writes[0])
            elif writes:
                rows, columns, pages = (np.concatenate(parts) for parts in zip(*writes, strict=True))
                taken.append((rows, columns, pages))
            else:
                none = np.empty(0, np.int32)
                taken.append((none, none, none))
        return taken
