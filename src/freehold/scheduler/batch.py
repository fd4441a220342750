"""Part of a step: rows, and how many tokens each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freehold.arrays import Int64


@dataclass
class Batch:
    """Rows [n], their known new tokens and the drafts on top."""

    rows: Int64
    counts: Int64
    drafts: Int64

    @classmethod
    def of(cls, rows: Int64, counts: Int64) -> Batch:
        return cls(rows, counts, np.zeros(len(rows), np.int64))

    @classmethod
    def empty(cls) -> Batch:
        return cls.of(np.empty(0, np.int64), np.empty(0, np.int64))

    def __add__(self, more: Batch) -> Batch:
        def joined(name: str) -> Int64:
            return np.concatenate([getattr(self, name), getattr(more, name)])

        return Batch(joined("rows"), joined("counts"), joined("drafts"))
