"""The engine's sequences by row: their tokens and length limits.

Per-step code is compiled. A step's weights evict Python's code and data from CPU caches, so that NumPy calls are slow
between steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from freehold.contract.arrays import Bool, Int32, Int64
from freehold.contract.step import NOT_SCORED, RowStart, Step


@dataclass(frozen=True)
class Work:
    """A step as actually run: `counts[i]` given tokens of row `rows[i]` from position `starts[i]`, then `proposed[i]`
    drafts. A count of 0 is a row that turned out to be full. The sequences with indices `chosen` are sampled, after the
    tokens at `sampled_at` in `tokens`: the last given one and each draft."""

    rows: Int64
    starts: Int64
    counts: Int64
    decodes: Bool  # continues from its own last sample; the others are prompt chunks
    proposed: Int64
    drafts: Int32  # [sequences, most proposed]
    tokens: Int32  # [sum of counts + proposed], flat
    chosen: Int64
    sampled_at: Int64

    @property
    def sizes(self) -> Int64:
        return self.counts + self.proposed


class Sequences:
    """Token table int32 [rows, token_limit + 1], length and max_length int64 [rows]."""

    def __init__(self, row_count: int, token_limit: int):
        self.tokens: Int32 = np.zeros((row_count, token_limit + 1), np.int32)
        self.length: Int64 = np.ones(row_count, np.int64)
        self.max_length: Int64 = np.full(row_count, token_limit + 1, np.int64)
        self.prompt_length: Int64 = np.zeros(row_count, np.int64)
        self.scored_from: Int64 = np.full(row_count, NOT_SCORED, np.int64)
        self.pooled_from: Int64 = np.full(row_count, NOT_SCORED, np.int64)
        self.observed: set[int] = set()  # rows whose prompt tokens are scored or pooled

    def start(self, start: RowStart) -> None:
        self.tokens[start.row, : len(start.tokens)] = start.tokens
        self.length[start.row] = len(start.tokens)
        self.max_length[start.row] = start.max_length
        self.prompt_length[start.row] = start.prompt_length
        self.scored_from[start.row] = start.scored_from
        self.pooled_from[start.row] = start.pooled_from
        self.observed.discard(start.row)
        if min(start.scored_from, start.pooled_from) < NOT_SCORED:
            self.observed.add(start.row)

    def end(self, row: int) -> None:
        """Stop the sequence: steps planned earlier find it full."""
        self.max_length[row] = self.length[row]

    def append(self, rows: Int64, counts: Int64, tokens: Int32) -> None:
        """Append `counts` [n] tokens to each of `rows` [n], flat in `tokens`."""
        _append(self.tokens, self.length, rows, counts, tokens)

    def pooled_range(self, row: int, start: int, end: int) -> tuple[int, int]:
        """Return the part of positions start .. end whose hidden states are pooled."""
        return max(start, int(self.pooled_from[row])), min(end, int(self.prompt_length[row]))

    def scored_range(self, row: int, start: int, end: int) -> tuple[int, int]:
        """Return the part of positions start .. end whose next prompt token is scored."""
        return max(start, int(self.scored_from[row])), min(end, int(self.prompt_length[row]) - 1)

    def room(self, step: Step) -> Int64:
        """Return the maximum drafts of each sequence of the step, int64 [sequences]."""
        if not step.drafts.any():
            return step.drafts
        room = self.max_length[step.rows] - self.length[step.rows] - 1
        return np.where(step.decodes, np.clip(step.drafts, 0, np.maximum(room, 0)), 0)

    def take_up(self, step: Step, drafts: Int32, proposed: Int64) -> Work:
        """Resolve a step: continue rows from their actual length, which the scheduler may not know yet."""
        starts, counts, tokens, chosen, sampled_at = _take_up(
            self.tokens, self.length, self.max_length, step.planned, np.ascontiguousarray(drafts), proposed
        )
        return Work(step.rows, starts, counts, step.decodes, proposed, drafts, tokens, chosen, sampled_at)


# Loops, not slices: Numba takes seconds to compile those.


@njit(cache=True)
def _append(tokens, length, rows, counts, new):
    at = 0
    for i in range(len(rows)):
        row = rows[i]
        assert length[row] + counts[i] <= tokens.shape[1]
        for _ in range(counts[i]):
            tokens[row, length[row]] = new[at]
            length[row] += 1
            at += 1


@njit(cache=True)
def _take_up(known, length, max_length, planned, drafts, proposed):
    """Return starts, counts, tokens, chosen and sampled_at of `Work`."""
    rows, decodes, samples = planned.rows, planned.decodes, planned.samples
    starts, counts = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    total, choices, samplings = 0, 0, 0
    for i in range(len(rows)):
        here = length[rows[i]]
        starts[i] = here - 1 if decodes[i] else planned.starts[i]
        counts[i] = 0 if decodes[i] and here >= max_length[rows[i]] else planned.counts[i]
        assert 0 <= starts[i] <= known.shape[1] - counts[i]
        assert proposed[i] <= drafts.shape[1]
        total += counts[i] + proposed[i]
        if samples[i] and counts[i]:
            choices += 1
            samplings += 1 + proposed[i]
    tokens = np.empty(total, np.int32)
    chosen, sampled_at = np.empty(choices, np.int64), np.empty(samplings, np.int64)
    at, choices, samplings = 0, 0, 0
    for i in range(len(rows)):
        for k in range(counts[i]):
            tokens[at + k] = known[rows[i], starts[i] + k]
        at += counts[i]
        for k in range(proposed[i]):
            tokens[at + k] = drafts[i, k]
        if samples[i] and counts[i]:
            chosen[choices] = i
            choices += 1
            for k in range(1 + proposed[i]):
                sampled_at[samplings] = at - 1 + k
                samplings += 1
        at += proposed[i]
    return starts, counts, tokens, chosen, sampled_at
