"""Which running request gives way to a more important one that waits."""

from __future__ import annotations

import numpy as np

from freehold.arrays import Int64
from freehold.memory import Memory
from freehold.scheduler.admission import Admission
from freehold.scheduler.queue import WaitingQueue
from freehold.scheduler.request import Request
from freehold.scheduler.running import RunningTable


class Preemption:
    """Rows may be taken from requests whose priority is lower by at least `threshold`."""

    def __init__(
        self, memory: Memory, queue: WaitingQueue, running: RunningTable, admission: Admission, threshold: int
    ):
        self._memory = memory
        self._queue = queue
        self._running = running
        self._admission = admission
        self._threshold = threshold

    def victim(self) -> int | None:
        """The row to retract, if the most important waiting request has no place, and would have one if less
        important ones went. One at a time: the next plan looks again."""
        head = self._queue.peek()
        if head is None:
            return None
        inferior = self._inferior(head)
        if not inferior:
            return None
        admission, leases, tree = self._admission, self._memory.leases, self._memory.tree
        match = admission.match(head)
        needed = admission.page_count_of(head, match) + tree.unheld_page_count(match)
        room = self._memory.reachable_page_count
        if leases.free_row_count and needed + admission.reserved_page_count() <= room:
            return None
        others = np.array([row for row in self._running.order.tolist() if row not in inferior], np.int64)
        rows = np.array(inferior, np.int64)
        private = self._private_page_count(rows)
        return inferior[0] if needed + admission.growth_page_count(others) <= room + private else None

    def _inferior(self, request: Request) -> list[int]:
        """Rows that may be preempted for `request`, least important first."""
        running, limit = self._running, request.priority - self._threshold
        rows = [row for row in running.order.tolist() if running.request(row).priority <= limit]
        return sorted(rows, key=lambda row: (running.request(row).priority, -running.request(row).order))

    def _private_page_count(self, rows: Int64) -> int:
        leases = self._memory.leases
        return int(((leases.allocated[rows] - leases.shared[rows]) // self._memory.page_size).sum())
