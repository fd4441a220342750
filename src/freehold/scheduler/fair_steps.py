"""Each client's limit per step while several compete."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np

from freehold.contract.arrays import Int64
from freehold.scheduler.chunk_budget import PromptBudget
from freehold.scheduler.queue import WaitingQueue
from freehold.scheduler.running import RunningTable
from freehold.scheduler.shares import Shares
from freehold.scheduler.step_time import StepTime

ROWS_FIRST = 8  # decoding rows a client may always have while step times are unknown
PROMPT_MIN = 2  # prompt tokens a client may always have in a step
WAITING_MAX = 8  # waiting requests examined
PART_MAX = 0.5  # of the least demanding client's step time, for each other client


class FairSteps:
    """Each client gets at most half the step time of the least demanding one. So each other client lengthens that
    client's steps by at most half. Clients that left a moment ago still compete, for most come back.

    Step times are learned (`StepTime`). Until they are known, prompt tokens are shared evenly, and a client may decode
    as many rows as all others together. A client may always decode `rows_min` rows.
    """

    def __init__(
        self, shares: Shares, queue: WaitingQueue, running: RunningTable, time: StepTime, rows_min: int | None
    ):
        self._shares = shares
        self._queue = queue
        self._running = running
        self._time = time
        self._rows_min = rows_min
        self._last: dict[int, int] = {}  # by client: the last row that decoded while others of it waited
        self._next_last: dict[int, int] = {}  # becomes `_last` once the planned step is submitted
        self._parts = _Parts({}, 0.0)  # of the planned step

    def is_contested(self, now: float) -> bool:
        return len(self._shares) > 1 or self._shares.somebody_left(now)

    def decoding(self, rows: Int64, prompts: Int64, now: float) -> Int64:
        """Return the decoding `rows` [n] that may run beside `prompts` [m], dropping those over their client's limit. A
        client's rows take turns by row number."""
        self._next_last = {}
        clients = self._running.client[rows]
        counts = np.bincount(clients, minlength=1)
        self._parts = self._allowed_parts(counts, prompts, now)
        waiting: list[Int64] = []
        for client in np.flatnonzero(counts > 1).tolist():
            limit = self._row_limit(client, counts)
            if limit < counts[client]:
                theirs = np.sort(rows[clients == client])
                theirs = np.roll(theirs, -int(np.searchsorted(theirs, self._last.get(client, -1), "right")))
                self._next_last[client] = int(theirs[limit - 1])
                waiting.append(theirs[limit:])
        return rows[~np.isin(rows, np.concatenate(waiting))] if waiting else rows

    def submitted(self) -> None:
        """Note that the planned step was submitted."""
        self._last = self._next_last

    def prompts(self, tokens: int, together: int | None, prompts: Int64) -> PromptBudget:
        """Return the budget that shares `tokens` between clients, at most `together` where several prompts run. Rows
        `prompts` [m] continue beside the result of `decoding`."""
        clients = set(self._running.client[prompts].tolist()) | self._queue.clients()
        even = max(-(-tokens // max(len(clients), 1)), PROMPT_MIN)
        if not self._time.token or not self._time.is_known:
            return PromptBudget(tokens, dict.fromkeys(clients, even), together)
        affordable = {client: int(self._parts.of(client) / self._time.token) for client in clients}
        shares = {client: min(max(affordable[client], PROMPT_MIN), even) for client in clients}
        return PromptBudget(tokens, shares, together)

    def _row_limit(self, client: int, counts: Int64) -> int:
        if self._time.is_known:
            return max(self._time.rows_within(self._parts.of(client)), self._rows_min or 1)
        mine, total = int(counts[client]), int(counts.sum())
        return mine if total == mine else max(total - mine, self._rows_min or ROWS_FIRST)

    def _allowed_parts(self, decoding: Int64, prompts: Int64, now: float) -> _Parts:
        """Return the seconds each client asks for; `decoding` [clients] counts its decoding rows. A client that asks
        for nothing right now counts as decoding one row: most will be back."""
        client_of, todo = self._running.client, self._running.todo(prompts)
        asked: dict[int, float] = {}
        for request in islice(self._queue.in_turn(), WAITING_MAX):
            asked[request.client_number] = self._time.token * len(request.tokens)
        for client, tokens in zip(client_of[prompts].tolist(), todo.tolist(), strict=True):
            asked[client] = self._time.token * tokens
        for client in np.flatnonzero(decoding).tolist():
            asked[client] = self._time.decode(int(decoding[client]))
        some_ask_nothing = len(asked) < len(self._shares) or self._shares.somebody_left(now)
        return _Parts(asked, min([*asked.values(), *([self._time.decode(1)] if some_ask_nothing else [])]))


class _Parts(NamedTuple):
    """Seconds of a step that each client asks for, and the least of them."""

    asked: dict[int, float]
    least: float

    def of(self, client: int) -> float:
        """Return the seconds a client may have."""
        return self.least if self.asked.get(client, 0.0) <= self.least else PART_MAX * self.least
