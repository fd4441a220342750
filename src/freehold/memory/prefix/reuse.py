"""How long prefixes wait until somebody asks for them again, learned while serving: for eviction.

A page that has waited `age` is worth the chance of its next hit for the time that it is kept for it, at the best
moment to give up: the index of Gittins (1979) for one that waits. Kept apart by how often pages were hit before
(LHD, Beckmann et al., NSDI 2018, learns its hit densities like this).
"""

from __future__ import annotations

import bisect

import numpy as np

from freehold.arrays import Float64

CLASSES = 4  # hit never, once, twice, more often
EDGES: Float64 = 2.0 ** np.arange(0.0, 25.0)  # of the buckets of age; the first begins at 0
LOW: Float64 = np.concatenate([[0.0], EDGES[:-1]])
WIDTH: Float64 = EDGES - LOW
BATCH = 512  # waits that are learned from at once
KEPT = 0.98  # of what was learned, when the next batch comes
PRIOR = 1.0  # pages: the chance falls as age grows, until there is experience


def class_of(hits: int) -> int:
    return min(hits, CLASSES - 1)


class ReuseStatistics:
    """Ages are in ticks of the tree: one for each prefix looked up or published."""

    def __init__(self) -> None:
        self._edges: list[float] = EDGES.tolist()
        self._waits: list[tuple[int, int, int, int, bool]] = []
        self._reused: Float64 = np.zeros((CLASSES, len(EDGES)))  # pages
        self._waited: Float64 = np.zeros((CLASSES, len(EDGES)))  # pages x ticks
        self._worth: list[list[float]] | None = None  # by class and bucket, until something is learned

    def wait(self, hits: int, start: int, end: int, pages: int, reused: bool) -> None:
        """Pages that were hit so often waited from age `start` to `end`, and were asked for then; or not, and
        nobody knows what comes later."""
        self._waits.append((class_of(hits), start, end, pages, reused))
        if len(self._waits) >= BATCH:
            self._learn()

    def worth(self, hits: int, age: int) -> float:
        """Expected hits for a tick that a page is kept."""
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
        """For each class and age the best that keeping on can bring, whenever one gives up."""
        rate = (self._reused + PRIOR) / (self._waited + PRIOR * EDGES)
        chance = 1.0 - np.exp(-rate * WIDTH)  # that a page still waiting is asked for in this bucket
        time = chance / rate
        best = np.empty_like(rate)
        for first in range(len(EDGES)):
            left = np.cumprod(1.0 - chance[:, first:], axis=1)
            waiting = np.concatenate([np.ones((CLASSES, 1)), left[:, :-1]], axis=1)
            hits = np.cumsum(waiting * chance[:, first:], axis=1)
            best[:, first] = (hits / np.cumsum(waiting * time[:, first:], axis=1)).max(axis=1)
        return best.tolist()
