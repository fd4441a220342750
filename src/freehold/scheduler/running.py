"""The running requests as rows of NumPy arrays, beside the lease table and with the same row numbers.

    tokens of a row    0 ....... scheduled ....... length ...... length + pending
                       |  computed or |   known, not  |  at most sampled by
                       |  in flight   |   scheduled   |  the steps in flight

A row has work to do while `scheduled < length + pending`. A prompt, its chunks, and decoding differ only
in how much. A step that verifies drafts counts for one token at least and for all of them at most: both
are kept (`certain`, `pending`), and the result settles them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from freehold.arrays import Bool, Int32, Int64
from freehold.scheduler.request import Request

RETRACTIONS_TRUSTED = 2  # a request retracted more often comes back only if all its output fits


class RunningTable:
    """Columns int64 [rows] unless said otherwise."""

    def __init__(self, row_count: int, token_limit: int):
        def column() -> Int64:
            return np.zeros(row_count, np.int64)

        # One spare column: the last token may be sampled without ever being given KV.
        self.tokens: Int32 = np.zeros((row_count, token_limit + 1), np.int32)
        self.length = column()
        self.scheduled = column()
        self.pending = column()  # tokens that the steps in flight sample at most
        self.certain = column()  # and at least
        self.prompt_length = column()
        self.prefill_end = column()  # tokens known when the row was taken: later ones are on the device
        self.min_length = column()  # no stop before this many tokens
        self.max_length = column()  # the request is finished at this many tokens
        self.ignore_eos: Bool = np.zeros(row_count, np.bool_)
        self.trusted: Bool = np.zeros(row_count, np.bool_)  # to stop before max_length
        self.watched: Bool = np.zeros(row_count, np.bool_)  # has stops of its own, or wants logprobs
        self.requests: np.ndarray[Any, Any] = np.full(row_count, None, object)  # of Request or None
        self.order: Int64 = np.empty(0, np.int64)  # rows in use, in order of admission

    def __len__(self) -> int:
        return len(self.order)

    def add(self, row: int, request: Request, max_length: int, computed: int) -> None:
        """Put a request, of whose tokens the first `computed` have KV, into a row."""
        tokens = request.tokens
        params = request.params
        prompt_length = len(request.prompt)
        self.tokens[row, : len(tokens)] = tokens
        self.length[row] = self.prefill_end[row] = len(tokens)
        self.scheduled[row] = computed
        self.pending[row] = self.certain[row] = 0
        self.prompt_length[row] = prompt_length
        self.min_length[row] = prompt_length + params.min_tokens
        self.max_length[row] = max_length
        self.ignore_eos[row] = params.ignore_eos
        self.trusted[row] = request.retractions < RETRACTIONS_TRUSTED
        self.watched[row] = bool(
            params.stop or params.stop_regex or params.stop_token_ids or params.logprobs is not None
        )
        self.requests[row] = request
        self.order = np.append(self.order, row)

    def remove(self, row: int) -> None:
        self.requests[row] = None
        self.order = self.order[self.order != row]

    def request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is not in use"
        return request

    def requests_of(self, rows: Int64) -> list[Request]:
        """The requests in `rows` [n], all of them in use."""
        return self.requests[rows].tolist()

    def known_tokens(self, row: int) -> Int32:
        """All tokens of the row that we know, int32 [length] (a view)."""
        return self.tokens[row, : self.length[row]]

    def output(self, row: int) -> Int32:
        """The tokens generated so far (a copy)."""
        return self.tokens[row, self.prompt_length[row] : self.length[row]].copy()

    def active(self) -> Int64:
        """Rows with tokens to compute, in order of admission. A row that will be finished by length
        when the steps in flight are done has none: nothing is allocated for it any more."""
        rows = self.order
        length = self.length[rows]
        waiting = length + self.pending[rows] > self.scheduled[rows]
        return rows[waiting & (length + self.certain[rows] < self.max_length[rows])]

    def is_decoding(self, rows: Int64) -> Bool:
        """Whether all tokens known when the row was taken are scheduled: what follows is sampled."""
        return self.scheduled[rows] >= self.prefill_end[rows]

    def todo(self, rows: Int64) -> Int64:
        """Tokens ready to be scheduled."""
        ahead = self.length[rows] + self.pending[rows] - self.scheduled[rows]
        return np.where(self.is_decoding(rows), 1, ahead)

    def targets(self, rows: Int64, counts: Int64) -> Int64:
        """Tokens that have KV at most when `counts` [n] more are scheduled; the very last needs none."""
        return np.minimum(self.scheduled[rows] + counts, self.max_length[rows] - 1)

    def settle(self, rows: Int64, sampled: Int64, at_most: Int64) -> None:
        """Steps gave `sampled` [n] tokens where `at_most` [n] were expected: all that was planned on top of
        them moves back. The tokens are in place; `length` advances."""
        self.length[rows] += sampled
        self.pending[rows] -= at_most
        self.certain[rows] -= 1
        reach = np.minimum(self.length[rows] + self.pending[rows], self.max_length[rows])
        self.scheduled[rows] = reach - 1
