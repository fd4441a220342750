"""Which running request yields to a waiting one: a more important one, or one of a client that holds less."""

from __future__ import annotations

from itertools import islice

import numpy as np

from freehold.contract.arrays import Int64
from freehold.memory import Match, Memory
from freehold.scheduler.admission import LOOKED_AT_MAX, Admission
from freehold.scheduler.queue import WaitingQueue
from freehold.scheduler.request import Request
from freehold.scheduler.running import RunningTable
from freehold.scheduler.shares import Shares


class Preemption:
    """With a `threshold`, rows may be taken from requests whose priority is lower by at least that. Rows may also be
    taken from clients that were served more than the beneficiary and still hold as much without them. So a client that
    yields is not next in line, and the same two never swap twice."""

    def __init__(
        self,
        memory: Memory,
        queue: WaitingQueue,
        running: RunningTable,
        shares: Shares,
        admission: Admission,
        threshold: int | None,
    ):
        self._memory = memory
        self._queue = queue
        self._running = running
        self._admission = admission
        self._shares = shares
        self._threshold = threshold

    def victim(self) -> int | None:
        """Return a row to retract, if the next request in line would then have a place. One at a time: the next plan
        looks again."""
        head = self._queue.peek()
        if head is None or not self._may_gain(head):
            return None
        self._admission.loading.start_clock(head)
        found = self._next_in_line()
        if found is None:
            return None
        request, match, passed = found
        prompts = self._prompts_before(request)
        if self._has_place(request, match):
            return self._first_of(prompts, self._inferior(request))
        ahead = self._ahead(request)
        # A client passed over would take a retracted row back before this request gets it.
        ahead = ahead[~np.isin(self._running.client[ahead], passed)]
        for rows in (self._inferior(request), ahead):
            if len(rows) and self._would_fit(request, match, rows):
                return self._first_of(prompts, rows) if len(prompts) else int(rows[0])
        return None

    def _prompts_before(self, request: Request) -> Int64:
        """Return rows computing prompts of the request's own client, while clients compete. They hold the tokens the
        request would begin with, so no other row need yield before them."""
        running = self._running
        if len(self._shares) < 2:
            return running.order[:0]
        mine = running.order[running.client[running.order] == request.client_number]
        return mine[running.todo(mine) > 0]

    def _first_of(self, prompts: Int64, rows: Int64) -> int | None:
        """Return the first of `rows` [n] that is in `prompts` [m]; None unless `rows` contains all `prompts`."""
        giving = rows[np.isin(rows, prompts)]
        return int(giving[0]) if 0 < len(giving) == len(prompts) else None

    def _may_gain(self, request: Request) -> bool:
        """Return quickly whether any row could yield."""
        others = int(np.count_nonzero(self._running.client[self._running.order] != request.client_number))
        return others > 1 or len(self._inferior(request)) > 0

    def _next_in_line(self) -> tuple[Request, Match, list[int]] | None:
        """Return the first request not blocked on a shared prefix, and the clients skipped. A shared prefix arrives
        soon without preemption."""
        sharing, passed = self._admission.pages_being_computed(), list[int]()
        for request in islice(self._queue.in_turn(), LOOKED_AT_MAX):
            match = self._admission.match(request)
            if match is not None and not self._admission.waits(request, match, sharing):
                return request, match, passed
            passed.append(request.client_number)
        return None

    def _has_place(self, request: Request, match: Match) -> bool:
        memory, admission = self._memory, self._admission
        needed = admission.page_counts_of(request, match) + memory.room.taken_by(match)
        is_room = (needed + admission.reserved_page_counts() <= memory.room.reachable).all()
        return memory.leases.free_row_count > 0 and bool(is_room)

    def _would_fit(self, request: Request, match: Match, rows: Int64) -> bool:
        """Return whether the request fits once `rows` [n] are retracted. Their private pages are freed, and tree pages
        pinned only by them become evictable. Prompts are published as they are computed, so that is most of them."""
        memory, admission = self._memory, self._admission
        others = np.setdiff1d(self._running.order, rows)
        gained, released = memory.room.gained_by(rows)
        needed = admission.page_counts_of(request, match) + memory.room.taken_by(match, released)
        room = memory.room.reachable + gained
        return len(others) == 0 or bool((needed + admission.growth_page_counts(others) <= room).all())

    def _inferior(self, request: Request) -> Int64:
        """Return rows less important than `request`, the least important first."""
        rows = self._running.least_important_first()
        if self._threshold is None:
            return rows[:0]
        return rows[self._running.priority[rows] <= request.priority - self._threshold]

    def _ahead(self, request: Request) -> Int64:
        """Return rows that clients yield to `request`. Such a client was served more than the request's. Without this
        row and the earlier ones returned, it still holds at least as much as the request's client will have with the
        request. Clients that hold most come first, and their least important rows first. The unit is rows if none is
        free, else pages that their tokens fill."""
        running, leases = self._running, self._memory.leases
        rows = running.least_important_first()
        mine, clients = request.client_number, running.client[rows]
        if leases.free_row_count == 0:
            sizes, needed = np.ones(len(rows), np.int64), 1
        else:
            sizes = leases.allocated[rows] // self._memory.page_size
            needed = self._admission.column_count_of(request)
        holds = np.bincount(clients, weights=sizes, minlength=mine + 1)
        by_client = np.lexsort((clients, -holds[clients]))
        rows, sizes, clients = rows[by_client], sizes[by_client], clients[by_client]
        gone = sizes.cumsum()
        begins = np.diff(clients, prepend=-1) != 0
        gone -= np.maximum.accumulate(np.where(begins, gone - sizes, 0))
        gives = self._shares.ahead_of(mine, clients) & (holds[clients] - gone >= holds[mine] + needed)
        if self._queue.policy == "priority":
            gives &= running.priority[rows] <= request.priority
        return rows[gives]
