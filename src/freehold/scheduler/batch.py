"""Part of a step: rows, and how many tokens each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freehold.contract.arrays import Bool, Int64


@dataclass(frozen=True)
class Batch:
    """All [n]."""

    rows: Int64
    starts: Int64  # where the new tokens begin
    counts: Int64  # known new tokens
    drafts: Int64  # on top of them
    decodes: Bool  # all tokens known when the row was taken are scheduled: what follows is sampled
    targets: Int64  # tokens that then have KV at most

    def __add__(self, more: Batch) -> Batch:
        def joined(name: str) -> Int64:
            return np.concatenate([getattr(self, name), getattr(more, name)])

        decodes = np.concatenate([self.decodes, more.decodes])
        return Batch(joined("rows"), joined("starts"), joined("counts"), joined("drafts"), decodes, joined("targets"))
