"""What the engine knows of the sequences in its rows: their tokens and how far they may go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freehold.arrays import Bool, Int32, Int64, ragged
from freehold.step import NOT_SCORED, RowStart, Step


@dataclass(frozen=True)
class Work:
    """A step as it is really run: `counts[i]` given tokens of row `rows[i]` from position `starts[i]`, then
    `proposed[i]` drafts. A count of 0 is a row that turned out to be full."""

    rows: Int64
    starts: Int64
    counts: Int64
    samples: Bool
    decodes: Bool  # takes up its own last sample; the others are chunks of prompts
    proposed: Int64
    drafts: Int32  # [sequences, most proposed]
    tokens: Int32  # [sum of counts + proposed], flat

    @property
    def sizes(self) -> Int64:
        return self.counts + self.proposed


class Sequences:
    """tokens int32 [rows, token_limit + 1], length and max_length int64 [rows]."""

    def __init__(self, row_count: int, token_limit: int):
        self.tokens: Int32 = np.zeros((row_count, token_limit + 1), np.int32)
        self.length: Int64 = np.ones(row_count, np.int64)
        self.max_length: Int64 = np.full(row_count, token_limit + 1, np.int64)
        self.prompt_length: Int64 = np.zeros(row_count, np.int64)
        self.scored_from: Int64 = np.full(row_count, NOT_SCORED, np.int64)
        self.pooled_from: Int64 = np.full(row_count, NOT_SCORED, np.int64)

    def start(self, start: RowStart) -> None:
        self.tokens[start.row, : len(start.tokens)] = start.tokens
        self.length[start.row] = len(start.tokens)
        self.max_length[start.row] = start.max_length
        self.prompt_length[start.row] = start.prompt_length
        self.scored_from[start.row] = start.scored_from
        self.pooled_from[start.row] = start.pooled_from

    def end(self, row: int) -> None:
        """Nothing more is computed for the sequence: steps that were planned before this was known find it full."""
        self.max_length[row] = self.length[row]

    def append(self, rows: Int64, counts: Int64, tokens: Int32) -> None:
        """`counts` [n] tokens for each of `rows` [n], flat."""
        sequence, offset = ragged(counts)
        self.tokens[rows[sequence], self.length[rows][sequence] + offset] = tokens
        self.length[rows] += counts

    def pooled_range(self, row: int, start: int, end: int) -> tuple[int, int]:
        """Of the positions start .. end, those whose hidden states are to be added up."""
        return max(start, int(self.pooled_from[row])), min(end, int(self.prompt_length[row]))

    def scored_range(self, row: int, start: int, end: int) -> tuple[int, int]:
        """Of the positions start .. end, those from which the following prompt token is to be scored."""
        return max(start, int(self.scored_from[row])), min(end, int(self.prompt_length[row]) - 1)

    def room(self, step: Step) -> Int64:
        """How many drafts each sequence of the step may have, int64 [sequences]."""
        room = self.max_length[step.rows] - self.length[step.rows] - 1
        return np.where(step.decodes, np.clip(step.drafts, 0, np.maximum(room, 0)), 0)

    def take_up(self, step: Step, drafts: Int32, proposed: Int64) -> Work:
        """Continue rows where they really are, which the scheduler may not know yet."""
        rows = step.rows
        here, length = step.decodes, self.length[rows]
        is_full = here & (length >= self.max_length[rows])
        counts = np.where(is_full, 0, step.counts)
        sizes = counts + proposed
        begin = np.cumsum(sizes) - sizes
        starts = np.where(here, length - 1, step.starts)
        sequence, offset = ragged(counts)
        tokens = np.empty(int(sizes.sum()), np.int32)
        tokens[begin[sequence] + offset] = self.tokens[rows[sequence], starts[sequence] + offset]
        for i in np.flatnonzero(proposed):
            at = begin[i] + counts[i]
            tokens[at : at + proposed[i]] = drafts[i, : proposed[i]]
        return Work(rows, starts, counts, step.samples & ~is_full, here, proposed, drafts, tokens)
