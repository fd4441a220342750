"""How many draft tokens are worth verifying, for each row."""

from __future__ import annotations

import numpy as np

from freehold.contract.arrays import Int64
from freehold.contract.step import DraftCost

PRIOR_ACCEPTANCE = 0.5
PRIOR_WEIGHT = 4.0  # in tokens of experience
MEMORY = 0.9  # of the experience, this share survives a step


class DraftBudget:
    """Learns each row's acceptance rate p and drafts as long as it pays.

    In a step of n tokens a token more costs 1 / (n + overhead) of the step, and a right one is worth 1 / n
    of it. The j-th draft is right with probability p^j, so k is the largest j with
    p^j >= n / (n + overhead) + proposal. Experience fades, so that a row that gave up tries again. A row with a grammar
    gets drafts even if nobody guesses any: the grammar may leave no choice.
    """

    def __init__(self, cost: DraftCost, row_count: int):
        self._cost = cost
        self._right = np.zeros(row_count)
        self._tried = np.zeros(row_count)
        self._forced: Int64 = np.zeros(row_count, np.int64)

    def start(self, row: int, is_bound: bool) -> None:
        """A new sequence takes the row; `is_bound` if it has a grammar."""
        self._forced[row] = self._cost.forced if is_bound else 0
        self._tried[row] = PRIOR_WEIGHT
        self._right[row] = PRIOR_WEIGHT * PRIOR_ACCEPTANCE

    def may_draft(self, rows: Int64) -> bool:
        """Whether one of `rows` [n] may ever have drafts."""
        return self._cost.limit > 0 or bool(self._forced[rows].any())

    def choose(self, rows: Int64, step_tokens: int) -> Int64:
        """Drafts for each of `rows` [n], when the step computes `step_tokens` without them."""
        if not self.may_draft(rows):
            return np.zeros(len(rows), np.int64)
        cost, forced = self._cost, self._forced[rows]
        rate = np.log(np.clip(self._right[rows] / self._tried[rows], 1e-3, 0.999))
        bar = step_tokens / (step_tokens + cost.overhead_tokens)
        certain = np.minimum(np.log(bar) / rate, forced)
        guessed = np.minimum(np.log(bar + cost.proposal) / rate, cost.limit)
        return np.maximum(certain, guessed).astype(np.int64)

    def learn(self, rows: Int64, proposed: Int64, accepted: Int64) -> None:
        """Of `proposed` [n] drafts the first `accepted` [n] were right."""
        tried = accepted + (accepted < proposed)
        self._right[rows] = MEMORY * self._right[rows] + (1 - MEMORY) * PRIOR_WEIGHT * PRIOR_ACCEPTANCE + accepted
        self._tried[rows] = MEMORY * self._tried[rows] + (1 - MEMORY) * PRIOR_WEIGHT + tried
