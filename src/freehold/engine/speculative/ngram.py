"""Prompt lookup: the continuation of an earlier occurrence of the last tokens (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from freehold.contract.arrays import Float32, Int32, Int64
from freehold.contract.step import RowStart
from freehold.engine.device import PageBytes
from freehold.engine.sequences import Sequences, Work

MATCH_MAX = 6  # longest match searched, in tokens
MATCH_MIN = 2


@njit(nogil=True, cache=True)
def find_continuation(tokens, length, shortest, longest):
    """Return where the longest, then newest, earlier occurrence of the last `shortest` .. `longest` tokens continues;
    -1 if there is none."""
    best, where = shortest - 1, -1
    for end in range(length - 1, shortest - 1, -1):
        same = 0
        while same < longest and same < end and tokens[end - 1 - same] == tokens[length - 1 - same]:
            same += 1
        if same > best:
            best, where = same, end
            if best == longest:
                break
    return where


class NgramSpeculator:
    """Needs no weights and no KV, and is free if it finds nothing."""

    def start(self, start: RowStart) -> None:
        """Do nothing: the tokens are the table."""

    def update_pages(self, updates: list[tuple[Int32, Int32, Int32]]) -> None:
        """Do nothing: it has no pages."""

    def page_bytes(self) -> Sequence[PageBytes]:
        return []

    def propose(self, sequences: Sequences, rows: Int64, limits: Int64) -> tuple[Int32, Int64]:
        found = np.zeros((len(rows), int(limits.max(initial=0))), np.int32)
        counts = np.zeros(len(rows), np.int64)
        for i, (row, limit) in enumerate(zip(rows.tolist(), limits.tolist(), strict=True)):
            tokens, length = sequences.tokens[row], int(sequences.length[row])
            at = find_continuation(tokens, length, MATCH_MIN, MATCH_MAX)
            if at >= 0:
                count = min(limit, length - at)
                found[i, :count] = tokens[at : at + count]
                counts[i] = count
        return found, counts

    def follow(self, sequences: Sequences, work: Work, hidden: Float32, written: Int64) -> Int64:
        return written

    def warm_up(self) -> float:
        find_continuation(np.zeros(8, np.int32), 8, MATCH_MIN, MATCH_MAX)
        return 0.0
