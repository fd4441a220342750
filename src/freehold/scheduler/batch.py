"""Rows of a step, and each row's token counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freehold.contract.arrays import Bool, Int64


@dataclass(frozen=True)
class Batch:
    """Arrays are [n]."""

    rows: Int64
    starts: Int64  # position of the first new token
    counts: Int64  # known new tokens
    drafts: Int64  # draft tokens beyond them
    decodes: Bool  # all tokens known at admission are scheduled: the rest are sampled
    targets: Int64  # upper bound of tokens with KV after the step

    def __add__(self, more: Batch) -> Batch:
        def joined(name: str) -> Int64:
            return np.concatenate([getattr(self, name), getattr(more, name)])

        decodes = np.concatenate([self.decodes, more.decodes])
        return Batch(joined("rows"), joined("starts"), joined("counts"), joined("drafts"), decodes, joined("targets"))
