"""How long pages wait for their next hit. Learned from served requests, and used for eviction.

The value of a page is its expected number of hits per tick of keeping it, maximized over the time at which to stop: the
Gittins index (Gittins 1979). It depends on the page's age, the time since its last use, and on how often the page was
hit before. LHD (Beckmann et al., NSDI 2018) learns hit densities in the same way.
"""

from __future__ import annotations

import bisect

import numpy as np

from freehold.contract.arrays import Float64

CLASSES = 4  # of pages by hits: none, one, two, more
EDGES: Float64 = 2.0 ** np.arange(0.0, 25.0)  # of the buckets of age; the first begins at 0
LOW: Float64 = np.concatenate([[0.0], EDGES[:-1]])
WIDTH: Float64 = EDGES - LOW
BATCH = 512  # waits in one update of the statistics
KEPT = 0.98  # factor by which older statistics fade with each update
PRIOR = 1.0  # pages. Without observations the hit rate falls with age, so eviction is LRU


def class_of(hits: int) -> int:
    return min(hits, CLASSES - 1)


class ReuseStatistics:
    """Hits and waiting time by class of hits and bucket of age. Ages are in ticks of the tree: one for each prefix used
    or published."""

    def __init__(self) -> None:
        self._edges: list[float] = EDGES.tolist()
        self._waits: list[tuple[int, int, int, int, bool]] = []
        self._reused: Float64 = np.zeros((CLASSES, len(EDGES)))  # pages
        self._waited: Float64 = np.zeros((CLASSES, len(EDGES)))  # pages x ticks
        self._worth: list[list[float]] | None = None  # by class and bucket, until something is learned

    def wait(self, hits: int, start: int, end: int, pages: int, reused: bool) -> None:
        """Record that `pages` pages with `hits` hits waited from age `start` to age `end`. `reused` says whether they
        were hit at `end`; otherwise the observation just ends there."""
        self._waits.append((class_of(hits), start, end, pages, reused))
        if len(self._waits) >= BATCH:
            self._learn()

    def worth(self, hits: int, age: int) -> float:
        """Return the expected hits per tick of keeping a page with `hits` hits and age `age`."""
        if self._worth is None:
            self._worth = self._best_rates()
        return self._worth[class_of(hits)][self._bucket(age)]

    def _bucket(self, age: int) -> int:
        return min(bisect.bisect_right(self._edges, age), len(self._edges) - 1)

    def _learn(self) -> None:
        kind, start, end, pages, reused = (np.array(column, np.float64) for column in zip(*self._waits, strict=True))
        span = np.minimum(end[:, None], EDGES) - np.maximum(start[:, None], LOW)
        span = np.maximum(span, 0.0) * pages[:, None]
        bucket = np.minimum(np.searchsorted(EDGES, end, side="right"), len(EDGES) - 1)
        for c in range(CLASSES):
            mine = kind == c
            came = mine & (reused > 0)
            self._waited[c] = KEPT * self._waited[c] + span[mine].sum(axis=0)
            self._reused[c] = KEPT * self._reused[c] + np.bincount(bucket[came], pages[came], len(EDGES))
        self._waits.clear()
        self._worth = None

    def _best_rates(self) -> list[list[float]]:
        """Return the Gittins index for each class and bucket of age."""
        rate = (self._reused + PRIOR) / (self._waited + PRIOR * EDGES)
        chance = 1.0 - np.exp(-rate * WIDTH)  # of a hit in this bucket, for a page that has reached it
        time = chance / rate
        best = np.empty_like(rate)
        for first in range(len(EDGES)):
            left = np.cumprod(1.0 - chance[:, first:], axis=1)
            waiting = np.concatenate([np.ones((CLASSES, 1)), left[:, :-1]], axis=1)
            hits = np.cumsum(waiting * chance[:, first:], axis=1)
            best[:, first] = (hits / np.cumsum(waiting * time[:, first:], axis=1)).max(axis=1)
        return best.tolist()
