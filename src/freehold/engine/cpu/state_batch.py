"""The states that a step reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freehold.contract.arrays import Int32, Int64, ragged
from freehold.engine.cpu.caches import GroupCache
from freehold.engine.cpu.recurrence import Visits


@dataclass(frozen=True)
class StateBatch:
    """Sequence i is in row `rows[i]` of the `table`, has `known[i]` tokens without drafts, and its states after drafts
    from slot `scratch[i]` on."""

    table: Int32
    rows: Int64
    known: Int64
    scratch: Int64
    visits: Visits

    @classmethod
    def of(
        cls, table: Int32, cache: GroupCache, rows: Int64, starts: Int64, counts: Int64, proposed: Int64
    ) -> StateBatch:
        """Build a batch. Sequence i has `counts[i]` tokens from position `starts[i]`, the last `proposed[i]` of them
        drafts. States after the last given token, and at the end of each earlier column with a page, go to those pages;
        states after drafts go to scratch."""
        size, given = cache.page_size, counts - proposed
        behind = np.maximum(starts - 1, 0) // size
        reads = np.where(starts > 0, table[rows, behind], -1).astype(np.int64)
        sequence, columns, ends = _columns(starts, starts + given, size)
        slots = table[rows[sequence], columns].astype(np.int64)
        kept = slots > 0
        sequence, afters, slots = sequence[kept], (ends - starts[sequence])[kept], slots[kept]
        scratch = cache.scratch_from + np.cumsum(proposed) - proposed
        drafting, draft = ragged(proposed)
        owner = np.concatenate([sequence, drafting])
        afters = np.concatenate([afters, given[drafting] + draft + 1])
        slots = np.concatenate([slots, scratch[drafting] + draft])
        order = np.lexsort((afters, owner))
        writes = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(rows)))])
        firsts = np.cumsum(counts) - counts
        known = starts + given
        visits = Visits(firsts, counts, reads, writes, afters[order], slots[order])
        return cls(table, rows, known, scratch, visits)

    def settle(self, cache: GroupCache, written: Int64) -> None:
        """Commit verified drafts: the first `written[i]` tokens of each sequence are right. States after accepted
        drafts are copied from scratch to their pages."""
        sequence, columns, ends = _columns(self.known, written, cache.page_size)
        slots = self.table[self.rows[sequence], columns]
        kept = slots > 0
        source = (self.scratch[sequence] + ends - self.known[sequence] - 1)[kept]
        for states in cache.states:
            states[slots[kept]] = states[source]


def _columns(starts: Int64, ends: Int64, page_size: int) -> tuple[Int64, Int64, Int64]:
    """Return the page columns of positions from `starts[i]` up to `ends[i]` as sequence, column, and the sequence's
    tokens at the column's end, or at its own."""
    first = starts // page_size
    count = np.where(ends > starts, (ends - 1) // page_size - first + 1, 0)
    sequence, index = ragged(count)
    columns = first[sequence] + index
    return sequence, columns, np.minimum((columns + 1) * page_size, ends[sequence])
