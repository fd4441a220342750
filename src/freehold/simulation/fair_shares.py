"""The oracle of fair shares: recounts what each step gives to each client."""

from __future__ import annotations

from collections import Counter

import numpy as np

from freehold.contract.step import Step
from freehold.scheduler.fair_steps import PROMPT_MIN, ROWS_FIRST
from freehold.scheduler.scheduler import Scheduler
from freehold.simulation.liveness import Unfair


class FairShares:
    """Checks every step as the engine gets it. `is_measured`: the engine reports step times, and clients share that
    time instead of rows."""

    def __init__(self, scheduler: Scheduler, is_measured: bool = False):
        self._scheduler = scheduler
        self._is_measured = is_measured
        self._left_out: Counter[str] = Counter()  # steps in a row without a request that could have decoded

    def check(self, step: Step) -> None:
        """Check a step. Raise Unfair."""
        running = self._scheduler.running
        decoding: Counter[str] = Counter()
        prompts: Counter[str] = Counter()
        for row, count, decodes in zip(step.rows.tolist(), step.counts.tolist(), step.decodes.tolist(), strict=True):
            client = running.request(row).client
            if decodes:
                decoding[client] += 1
            else:
                prompts[client] += count
        self._check_prompts(prompts)
        self._check_decoding(decoding, step)

    def _check_prompts(self, prompts: Counter[str]) -> None:
        scheduler, running = self._scheduler, self._scheduler.running
        active = running.active()
        waiting = {request.client for request in scheduler.requests.values() if request.is_queued}
        going_on = {running.request(row).client for row in active[running.todo(active) > 0].tolist()}
        clients = waiting | going_on | set(prompts)
        share = max(-(-scheduler.config.chunked_prefill_size // max(len(clients), 1)), PROMPT_MIN)
        for client, tokens in prompts.items():
            if len(clients) > 1 and tokens > share:
                raise Unfair(f"{tokens} prompt tokens in a step for client '{client}', its share is {share}")

    def _check_decoding(self, decoding: Counter[str], step: Step) -> None:
        running, least = self._scheduler.running, self._scheduler.config.fair_decode_rows or ROWS_FIRST
        for client, rows in decoding.items():
            others = decoding.total() - rows
            if others and rows > max(least, others) and not self._is_measured:
                raise Unfair(f"{rows} rows decode for client '{client}', {others} for all others")
        active = running.active()
        active = active[running.todo(active) <= 0]
        left_out = {running.request(row) for row in np.setdiff1d(active, step.rows).tolist()}
        self._left_out = Counter({request.id: self._left_out[request.id] + 1 for request in left_out})
        for request in left_out:
            if decoding[request.client] < least:
                raise Unfair(f"{request.id} is left out, and its client decodes {decoding[request.client]} rows")
            if self._left_out[request.id] > 2 + len(running.requests) // least:
                raise Unfair(f"{request.id} is left out {self._left_out[request.id]} times in a row")
