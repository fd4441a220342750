"""The flight recorder: the latest moves of ownership, kept to diagnose a wrong one."""

from typing import NamedTuple

import numpy as np

from freehold.contract.arrays import Int32, Int64
from freehold.memory.ledger import owner


class Move(NamedTuple):
    """A change of a page's owner while `step` was the newest step submitted."""

    step: int
    page: int
    source: int
    target: int

    def __str__(self) -> str:
        return f"step {self.step}: {owner.describe(self.source)} -> {owner.describe(self.target)}"


class FlightRecorder:
    """A ring of the newest `size` moves of pages 0 .. `capacity`, written vectorised. A page's moves are a chain."""

    def __init__(self, capacity: int, size: int):
        """Create a ring of `size` moves, at least `capacity`, so that any move fits."""
        self._rows = np.zeros((size, 5), np.int64)  # as `Move`, then the number of the page's previous move, or -1
        self._newest: Int64 = np.full(capacity + 1, -1, np.int64)  # the number of each page's newest move
        self._written = 0

    def record(self, step: int, pages: Int32, source: int | Int64, target: int | Int64) -> None:
        """Record that `pages` [n], all different, change owners."""
        size = len(self._rows)
        count = len(pages)
        at = self._written % size
        head = min(count, size - at)
        self._write(slice(at, at + head), slice(0, head), step, pages, source, target)
        if head < count:
            rest = slice(head, count)
            self._write(slice(0, count - head), rest, step, pages, source, target)
        self._newest[pages] = np.arange(self._written, self._written + count)
        self._written += count

    def _write(self, to: slice, part: slice, step: int, pages: Int32, source: int | Int64, target: int | Int64) -> None:
        rows = self._rows[to]
        rows[:, 0] = step
        rows[:, 1] = pages[part]
        rows[:, 2] = source if isinstance(source, int) else source[part]
        rows[:, 3] = target if isinstance(target, int) else target[part]
        rows[:, 4] = self._newest[pages[part]]

    def history(self, page: int, limit: int = 16) -> list[Move]:
        """Return the newest moves of one page, oldest first."""
        moves: list[Move] = []
        number = int(self._newest[page])
        while number >= max(self._written - len(self._rows), 0) and len(moves) < limit:
            *move, number = self._rows[number % len(self._rows)].tolist()
            moves.append(Move(*move))
        return moves[::-1]
