"""How many draft tokens are worth verifying per row."""

from __future__ import annotations

import numpy as np

from freehold.contract.arrays import Int64
from freehold.contract.step import DraftCost

PRIOR_ACCEPTANCE = 0.5
PRIOR_WEIGHT = 4.0  # in tokens of experience
MEMORY = 0.9  # share of the experience that survives a step


class DraftBudget:
    """Learns each row's acceptance rate p and drafts as long as it pays.

    In a step of n tokens, one more costs 1 / (n + overhead) of the step, and a correct one is worth 1 / n of it. The
    j-th draft is correct with probability p^j, so k is the largest j with p^j >= n / (n + overhead) + proposal.
    Experience fades, so a row that stopped drafting tries again. A row with a grammar gets drafts even without a
    proposer: the grammar may leave only one choice.
    """

    def __init__(self, cost: DraftCost, row_count: int):
        self._cost = cost
        self._right = np.zeros(row_count)
        self._tried = np.zeros(row_count)
        self._forced: Int64 = np.zeros(row_count, np.int64)

    def start(self, row: int, is_bound: bool) -> None:
        """Reset the row for a new sequence; `is_bound` if it has a grammar."""
        self._forced[row] = self._cost.forced if is_bound else 0
        self._tried[row] = PRIOR_WEIGHT
        self._right[row] = PRIOR_WEIGHT * PRIOR_ACCEPTANCE

    def may_draft(self, rows: Int64) -> bool:
        """Return whether any of `rows` [n] can have drafts."""
        return self._cost.limit > 0 or bool(self._forced[rows].any())

    def choose(self, rows: Int64, step_tokens: int) -> Int64:
        """Return the number of drafts for each of `rows` [n] in a step of `step_tokens` other tokens."""
        if not self.may_draft(rows):
            return np.zeros(len(rows), np.int64)
        cost, forced = self._cost, self._forced[rows]
        rate = np.log(np.clip(self._right[rows] / self._tried[rows], 1e-3, 0.999))
        bar = step_tokens / (step_tokens + cost.overhead_tokens)
        certain = np.minimum(np.log(bar) / rate, forced)
        guessed = np.minimum(np.log(bar + cost.proposal) / rate, cost.limit)
        return np.maximum(certain, guessed).astype(np.int64)

    def learn(self, rows: Int64, proposed: Int64, accepted: Int64) -> None:
        """Record that the first `accepted` [n] of `proposed` [n] drafts were right."""
        tried = accepted + (accepted < proposed)
        self._right[rows] = MEMORY * self._right[rows] + (1 - MEMORY) * PRIOR_WEIGHT * PRIOR_ACCEPTANCE + accepted
        self._tried[rows] = MEMORY * self._tried[rows] + (1 - MEMORY) * PRIOR_WEIGHT + tried
