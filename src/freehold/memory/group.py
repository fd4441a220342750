"""Cache groups: layers that look back equally far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from freehold.contract.arrays import Bool, Int64


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose KV is allocated and freed together. A model has one or more groups.

    `lookback` is the group's only rule: how many tokens before a position its layers read. None is all of them (full
    attention), W - 1 a sliding window of W tokens, 1 a recurrent state. With a lookback the group is *bounded*: a
    running sequence gives back pages that no later step can read.

    A page of a state group holds one state, the one after the last token written in its column. Most columns of such a
    group have no page. `page_count` None is as many pages as the full groups have. Raises ValueError.
    """

    name: str = "full"
    lookback: int | None = None
    is_state: bool = False
    page_count: int | None = None

    def __post_init__(self) -> None:
        if self.lookback is not None and self.lookback < 1:
            raise ValueError(f"cache group {self.name}: lookback must be at least 1, not {self.lookback}")
        if self.is_state and self.lookback != 1:
            raise ValueError(f"cache group {self.name}: a state looks back on 1 token, not {self.lookback}")

    @property
    def is_bounded(self) -> bool:
        return self.lookback is not None

    @overload
    def first_column(self, boundary: int, page_size: int) -> int: ...

    @overload
    def first_column(self, boundary: Int64, page_size: int) -> Int64: ...

    def first_column(self, boundary: int | Int64, page_size: int) -> int | Int64:
        """Return the first page column needed to resume from `boundary` tokens; int64 [n] or a number."""
        if self.lookback is None:
            return boundary * 0
        behind = boundary - self.lookback
        return behind * (behind > 0) // page_size

    def pages_of_a_row(self, page_size: int, step_tokens: int, checkpoint_interval: int = 0) -> int:
        """Return the most pages that a row of a bounded group holds, with steps of up to `step_tokens` tokens and two
        in flight: the lookback, the page being written, and both steps. Of states: the one the row resumes from; for
        each step the last one and those at multiples of the interval; and two where the prompt ends or branches."""
        assert self.lookback is not None
        if self.is_state:
            every = -(-step_tokens // checkpoint_interval) if checkpoint_interval else 0
            return 1 + 2 * (1 + every) + CHECKPOINTS
        return -(-self.lookback // page_size) + 2 + 2 * -(-step_tokens // page_size)


CHECKPOINTS = 2  # boundaries of a prompt at which its state is kept, besides those of the interval


def longest_boundary(groups: Sequence[CacheGroup], page_size: int, present: Sequence[Bool]) -> int:
    """Return the most tokens from which all `groups` can resume; `present[group]` bool [columns]: where it has a
    page."""
    columns = np.arange(len(present[0]))
    boundaries = (columns + 1) * page_size
    is_ready: Bool = np.ones(len(columns), np.bool_)
    for group, has_page in zip(groups, present, strict=True):
        last_hole = np.maximum.accumulate(np.where(has_page, -1, columns))
        is_ready &= last_hole < group.first_column(boundaries, page_size)
    ready = is_ready.nonzero()[0]
    return int(boundaries[ready[-1]]) if len(ready) else 0


def with_draft(groups: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """Add a group for a draft model's KV. It is allocated, published and freed with the model's."""
    return (*groups, CacheGroup("draft"))
