"""Part of a step: rows, and how many tokens each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freehold.arrays import Int64


@dataclass(frozen=True)
class Batch:
    """Rows [n], their known new tokens, the drafts on top, and the tokens that then have KV at most."""

    rows: Int64
    counts: Int64
    drafts: Int64
    targets: Int64

    def __add__(self, more: Batch) -> Batch:
        def joined(name: str) -> Int64:
            return np.concatenate([getattr(self, name), getattr(more, name)])

        return Batch(joined("rows"), joined("counts"), joined("drafts"), joined("targets"))
