"""A step's tokens, their slots, and their grouping for attention."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from freehold.contract.arrays import Float32, Int32, Int64
from freehold.engine.cpu.attention import BATCH
from freehold.engine.cpu.items import Joined, Parts
from freehold.engine.cpu.operation import address
from freehold.engine.cpu.step_items import divide


class CpuBatch(NamedTuple):
    """Item i has members `item_members[i]` up to `item_members[i + 1]`, which share their first `item_shared[i]`
    positions, a multiple of 64. `members`: rows of `Members`. Segments that are parts have `kept_queries` queries
    together. `record`: a BATCH for the operations."""

    positions: Int64  # [tokens]
    slots: Int64  # [tokens]
    tables: Int32  # [rows, pages]
    item_members: Int64  # [items + 1]
    item_shared: Int64  # [items]
    members: Int64  # [4, members]
    parts: Parts
    kept_queries: int
    joined: Joined
    record: np.ndarray
    kept: list[Float32]  # room for the softmaxes of parts

    @classmethod
    def of(
        cls, tables: Int32, page_size: int, rows: Int64, starts: Int64, counts: Int64, may_share: bool = True
    ) -> CpuBatch:
        """Build a batch. Sequence i has `counts[i]` new tokens from position `starts[i]`, its pages in
        `tables[rows[i]]`. Layers with a window may not share: outside it, tables name freed pages."""
        record = np.zeros(1, BATCH)
        positions, slots, firsts, shared, members, parts, joined, kept = divide(
            tables, page_size, rows, starts, counts, may_share, numba.get_num_threads(), record
        )
        return cls(positions, slots, tables, firsts, shared, members, Parts(*parts), kept, Joined(*joined), record, [])

    def make_room(self, heads: int, size: int) -> None:
        """Make room for the softmaxes of parts, in layers of up to this many heads and value numbers."""
        rows = self.kept_queries * heads
        if not rows or (self.kept and len(self.kept[0]) >= rows * size):
            return
        self.kept[:] = [np.empty(count, np.float32) for count in (rows * size, rows, rows)]
        for name, room in zip(("kept_sums", "kept_levels", "kept_weights"), self.kept, strict=True):
            self.record[name] = address(room)
