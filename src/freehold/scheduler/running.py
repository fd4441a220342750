"""The running requests as rows of NumPy arrays, beside the lease table and with the same row numbers.

    tokens of a row    0 ....... scheduled ....... length ....... most - unsure ....... most
                       |  computed or |   known, not  |       sampled by the steps      |
                       |  in flight   |   scheduled   |            in flight            |

`scheduled < most` holds for every row. A row has work to do until `most - unsure` reaches `max_length`. A prompt, its
chunks and decoding differ only in size. A step that verifies drafts yields between one token and all of them: those
are `unsure`, and the result settles them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from freehold.contract.arrays import Bool, Int32, Int64
from freehold.scheduler.batch import Batch
from freehold.scheduler.request import Request


class RunningTable:
    """Columns are int64 [rows] unless noted."""

    def __init__(self, row_count: int, token_limit: int):
        def column() -> Int64:
            return np.zeros(row_count, np.int64)

        # One spare column: the last token may be sampled but never gets KV.
        self.tokens: Int32 = np.zeros((row_count, token_limit + 1), np.int32)
        self.length = column()
        self.scheduled = column()
        self.most = column()  # upper bound of tokens known once the steps in flight complete
        self.unsure = column()  # those of them that are drafts
        self.prefill_end = column()  # tokens known at admission: later ones are on the device
        self.min_length = column()  # no stop before this many tokens
        self.max_length = column()  # the request is finished at this many tokens
        self.watch_from = column()  # from this length on, each token may end it
        self.ignore_eos: Bool = np.zeros(row_count, np.bool_)
        self.is_bound: Bool = np.zeros(row_count, np.bool_)  # by a grammar: it allows EOS only as a last resort
        self.trusted: Bool = np.zeros(row_count, np.bool_)  # to stop before max_length
        self.priority = column()
        self.arrival = column()  # its place in the order of arrivals
        self.client = column()  # client number
        self.requests: np.ndarray[Any, Any] = np.full(row_count, None, object)  # Request or None
        self.order: Int64 = np.empty(0, np.int64)  # rows in use, in order of admission

    def __len__(self) -> int:
        return len(self.order)

    def add(self, row: int, request: Request, max_length: int, computed: int) -> None:
        """Put a request into a row. Its first `computed` tokens have KV."""
        tokens = request.tokens
        params = request.params
        self.tokens[row, : len(tokens)] = tokens
        self.length[row] = self.most[row] = self.prefill_end[row] = len(tokens)
        self.scheduled[row] = computed
        self.unsure[row] = 0
        self.min_length[row] = len(request.prompt) + params.min_tokens
        self.max_length[row] = max_length
        self.ignore_eos[row] = params.ignore_eos
        self.is_bound[row] = params.constraint is not None
        self.trusted[row] = request.is_trusted
        self.priority[row] = request.priority
        self.arrival[row] = request.order
        self.client[row] = request.client_number
        has_own_stops = params.stop or params.stop_regex or params.stop_token_ids
        self.watch_from[row] = 0 if has_own_stops or params.logprobs is not None else max_length
        self.requests[row] = request
        self.order = np.append(self.order, row)

    def remove(self, row: int) -> None:
        self.requests[row] = None
        self.order = self.order[self.order != row]

    def least_important_first(self) -> Int64:
        """Return rows in use: lowest priority first, then latest arrival first."""
        return self.order[np.lexsort((-self.arrival[self.order], self.priority[self.order]))]

    def request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is not in use"
        return request

    def requests_of(self, rows: Int64) -> list[Request]:
        """Return the requests in `rows` [n], all in use."""
        return self.requests[rows].tolist()

    def known_tokens(self, row: int) -> Int32:
        """Return all known tokens of the row, int32 [length] (a view)."""
        return self.tokens[row, : self.length[row]]

    def active(self) -> Int64:
        """Return rows with tokens to compute, in order of admission. A row that the steps in flight will finish by
        length has none: nothing is allocated for it any more."""
        rows = self.order
        return rows[self.most[rows] - self.unsure[rows] < self.max_length[rows]]

    def todo(self, rows: Int64) -> Int64:
        """Return unscheduled prompt tokens [n]."""
        return self.prefill_end[rows] - self.scheduled[rows]

    def batch(self, rows: Int64, counts: Int64, drafts: Int64) -> Batch:
        """Return a batch of `counts` [n] more tokens for `rows` [n], plus `drafts` [n]. The last token of a sequence
        needs no KV."""
        starts = self.scheduled[rows]
        targets = np.minimum(starts + counts + drafts, self.max_length[rows] - 1)
        return Batch(rows, starts, counts, drafts, starts >= self.prefill_end[rows], targets)

    def submit(self, batch: Batch, samples: Bool) -> None:
        """Mark the batch as in flight; it samples where `samples` [n]."""
        rows = batch.rows
        self.scheduled[rows] = batch.targets
        self.most[rows] += samples
        if np.count_nonzero(batch.drafts):
            self.most[rows] += batch.drafts
            self.unsure[rows] += batch.drafts

    def settle(self, rows: Int64, sampled: Int64, drafts: Int64) -> None:
        """Count `sampled` [n] tokens, already in place, of the `drafts` [n] + 1 that were possible. Move back what was
        planned beyond the missing ones."""
        self.length[rows] += sampled
        unsure = drafts.nonzero()[0]
        if len(unsure):
            rows, sampled, drafts = rows[unsure], sampled[unsure], drafts[unsure]
            self.most[rows] += sampled - drafts - 1
            self.unsure[rows] -= drafts
            self.scheduled[rows] = np.minimum(self.most[rows], self.max_length[rows]) - 1
