"""Which running request gives way to a more important one that waits."""

from __future__ import annotations

import numpy as np

from freehold.arrays import Int64
from freehold.memory import Match, Memory
from freehold.scheduler.admission import LOOKED_AT_MAX, Admission
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
        """The row to retract, if the most important request that waits for a place would have one if less
        important ones went. One at a time: the next plan looks again."""
        head = self._queue.peek()
        if head is None or len(self._inferior(head)) == 0:
            return None
        found = self._next_in_line()
        if found is None:
            return None
        request, match = found
        rows = self._inferior(request)
        if len(rows) == 0 or self._has_place(request, match) or not self._would_fit(request, match, rows):
            return None
        return int(rows[0])

    def _next_in_line(self) -> tuple[Request, Match] | None:
        """The first that does not wait for a prefix: that it would have soon, whoever runs."""
        sharing = self._admission.pages_being_computed()
        for position in range(min(len(self._queue), LOOKED_AT_MAX)):
            request = self._queue[position]
            match = self._admission.match(request)
            if not self._admission.waits(request, match, sharing):
                return request, match
        return None

    def _has_place(self, request: Request, match: Match) -> bool:
        memory, admission = self._memory, self._admission
        needed = admission.page_count_of(request, match) + memory.tree.holds.unheld_page_count(match)
        room = memory.reachable_page_count
        return memory.leases.free_row_count > 0 and needed + admission.reserved_page_count() <= room

    def _would_fit(self, request: Request, match: Match, rows: Int64) -> bool:
        """If the requests in `rows` [n] went: their private pages come back, and so does what only they hold of
        the tree. Prompts are published as they are computed, so that is most of it."""
        memory, admission, tree = self._memory, self._admission, self._memory.tree
        leases = memory.leases
        taken: set[int] = set(rows.tolist())
        nodes = [lease.node for lease in leases.open_leases if lease.row in taken]
        released = tree.holds.only_by(nodes)
        private = int(((leases.allocated[rows] - leases.shared[rows]) // memory.page_size).sum())
        room = memory.reachable_page_count + private + sum(node.page_count for node in released)
        others = np.setdiff1d(self._running.order, rows)
        needed = admission.page_count_of(request, match) + tree.holds.unheld_page_count(match, released)
        return len(others) == 0 or needed + admission.growth_page_count(others) <= room

    def _inferior(self, request: Request) -> Int64:
        """Rows that may be preempted for `request`, least important first."""
        rows = self._running.least_important_first()
        return rows[self._running.priority[rows] <= request.priority - self._threshold]
