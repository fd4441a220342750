"""The flight recorder: the last moves of ownership, kept for the day one of them is wrong."""

from typing import NamedTuple

import numpy as np

from freehold.arrays import Int32, Int64
from freehold.memory.ledger import owner


class Move(NamedTuple):
    """One page changed hands while `step` was the newest step submitted."""

    step: int
    page: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"step {self.step}: {owner.describe(self.source)} -> {owner.describe(self.target)}"


class FlightRecorder:
    """A ring of the newest `size` page moves, written vectorised."""

    def __init__(self, size: int = 1 << 16):
        self._rows = np.zeros((size, 4), np.int64)
        self._written = 0

    def record(self, step: int, pages: Int32, source: int | Int64, target: int | Int64) -> None:
        size = len(self._rows)
        count = len(pages)
        if count > size:
            raise ValueError(f"a move of {count} pages does not fit the recorder of {size}")
        at = self._written % size
        self._written += count
        head = min(count, size - at)
        self._write(slice(at, at + head), slice(0, head), step, pages, source, target)
        if head < count:
            rest = slice(head, count)
            self._write(slice(0, count - head), rest, step, pages, source, target)

    def _write(self, to: slice, part: slice, step: int, pages: Int32, source: int | Int64, target: int | Int64) -> None:
        rows = self._rows[to]
        rows[:, 0] = step
        rows[:, 1] = pages[part]
        rows[:, 2] = source if isinstance(source, int) else source[part]
        rows[:, 3] = target if isinstance(target, int) else target[part]

    def history(self, page: int, limit: int = 16) -> list[Move]:
        """The newest moves of one page, oldest first."""
        size = len(self._rows)
        count = min(self._written, size)
        order = np.arange(self._written - count, self._written) % size
        rows = self._rows[order]
        hits = rows[rows[:, 1] == page][-limit:]
        return [Move(*(int(value) for value in row)) for row in hits]
