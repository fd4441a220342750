"""What of a step each client may have while several compete."""

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

ROWS_FIRST = 8  # that a client may decode whoever competes, while nobody knows what they cost
PROMPT_MIN = 2  # prompt tokens of a client in a step, whatever they cost
WAITING_MAX = 8  # waiting requests looked at
PART_MAX = 0.5  # of the step that the client that asks for least would have, for each of the others


class FairSteps:
    """No client's part of a step may take longer than half of the step that the client that asks for least would have.
    So each other client makes that client's steps longer by half. Clients that have left a moment ago still compete,
    for most come back.

    What parts take is learned (`StepTime`). Until it is known, prompt tokens are shared evenly, and of decoding rows a
    client may have as many as the others together. `rows_min` rows it may always have.
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
        self._next_last: dict[int, int] = {}  # if the step that is planned is submitted
        self._parts = _Parts({}, 0.0)  # of the step that is planned

    def is_contested(self, now: float) -> bool:
        return len(self._shares) > 1 or self._shares.somebody_left(now)

    def decoding(self, rows: Int64, prompts: Int64, now: float) -> Int64:
        """`rows` [n] that decode, beside `prompts` [m] that go on, without those that are too many of one client. Its
        rows take turns, in the order of their numbers."""
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
        """The step that was planned last is under way."""
        self._last = self._next_last

    def prompts(self, tokens: int, together: int | None, prompts: Int64) -> PromptBudget:
        """How `tokens` for prompts are shared, of which several have `together`, if those of rows `prompts` [m] go on
        beside what `decoding` gave."""
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
        """`decoding` [clients] are the rows of each that decode. Who asks for nothing at the moment, because it waits
        for the end of a request or has just had it, counts as decoding a row: most will be back."""
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
        """What a client may have."""
        return self.least if self.asked.get(client, 0.0) <= self.least else PART_MAX * self.least
