"""The oracle of times and totals: recounts those of scheduler and requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

import numpy as np

from freehold.scheduler.request import FinishKind, Request
from freehold.scheduler.results import StepOutput
from freehold.scheduler.scheduler import Scheduler
from freehold.scheduler.states import Event, RequestState


class Totals:
    """Checks each output of a scheduler. `is_exact`: no step samples tokens beyond the end of a request."""

    def __init__(self, scheduler: Scheduler, is_exact: bool):
        self._scheduler = scheduler
        self._is_exact = is_exact
        self._tokens = 0
        self._first: dict[str, float] = {}  # when each request had its first token
        self._started: Counter[str] = Counter()

    def take(self, output: StepOutput) -> None:
        """Check an output. Raise AssertionError."""
        now = self._scheduler.lifecycle.clock()
        self._tokens += len(output.tokens)
        for request in output.requests:
            self._first.setdefault(request.id, now)
        self._started.update(request.id for request in output.started)
        for request in output.ended:
            self._check(request, now)
        self._check_scheduled()

    def _check_scheduled(self) -> None:
        """Check that rows which decode have KV reserved up to their last token, and no further."""
        running = self._scheduler.running
        rows = running.order[running.scheduled[running.order] >= running.prefill_end[running.order]]
        expected = np.minimum(running.most[rows], running.max_length[rows]) - 1
        wrong = rows[running.scheduled[rows] != expected]
        assert not len(wrong), (
            f"rows {wrong}: {running.scheduled[wrong]} tokens scheduled, {running.most[wrong]} at most"
        )

    def _check(self, request: Request, now: float) -> None:
        first = self._first.pop(request.id, None)
        assert (request.first_token, request.ended) == (first, now), f"{request.id}: {request.first_token}, {first}"
        seconds, whole = sum(request.seconds_in.values()), now - request.arrival
        assert seconds <= whole + 1e-9, f"{request.id}: {seconds} s in all states, {whole} since it came"
        is_known = request.params.constraint is None  # others may have waited for their grammar first
        assert not is_known or math.isclose(seconds, whole, abs_tol=1e-9), f"{request.id}: {seconds} s of {whole}"
        decoded = request.transitions[RequestState.PREFILLING, Event.DECODED]
        assert self._started.pop(request.id, 0) == decoded, f"{request.id} started {decoded} times"
        kept = request.retained_tokens
        assert 0 <= kept <= (0 if request.retention is None else len(request.tokens)), f"{request.id}: kept {kept}"

    def check(self, requests: Collection[Request]) -> None:
        """Compare the scheduler's totals with `requests`: all it ever had. Raise AssertionError."""
        results, lifecycle = self._scheduler.results, self._scheduler.lifecycle
        assert results.token_count == self._tokens or (results.token_count > self._tokens and not self._is_exact)
        assert results.drafted_count == sum(request.drafted for request in requests)
        assert results.accepted_count == sum(request.accepted for request in requests)
        assert lifecycle.retraction_count == sum(request.retractions for request in requests)
        ends = [request.finish for request in requests if request.finish is not None]
        refused = [end for end in ends if end.kind is FinishKind.ERROR and "too complex for this output" in end.message]
        assert results.refused_count == len(refused)
