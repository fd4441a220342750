"""Speculation with a smaller draft model (Leviathan, Kalman and Matias 2023; Chen et al. 2023)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from freehold.contract.arrays import Float32, Int32, Int64
from freehold.contract.step import KVShape, RowStart
from freehold.engine.device import Device, PageBytes
from freehold.engine.placed_model import PlacedModel
from freehold.engine.sampler import Sampler
from freehold.engine.sequences import Sequences, Work
from freehold.models.tensor import Checkpoint

LAG_MAX = 15  # tokens that the draft's KV may lag behind while it does not draft


class DraftModelSpeculator:
    """Keeps its KV in its own cache group, page by page beside the model's.

    While a row drafts nothing its KV lags, and catches up at once: the weights are read once for many tokens, so that
    unprofitable drafts cost almost nothing. For sampling requests, the draft uses the same random number (a coupling of
    both distributions: similar models then agree often). `lag_max` is 0 beside a model with states, since a state
    includes all written tokens, which are counted for both.
    """

    def __init__(self, checkpoint: Checkpoint, shape: KVShape, device: Device, sampler: Sampler, lag_max: int):
        own = replace(shape, page_counts=shape.page_counts[-1:])
        self._lag_max = lag_max
        self._model = PlacedModel(checkpoint, device, own, checkpoint.spec.one_layout(), "float32")
        self._sampler = sampler
        self._written: Int64 = np.zeros(shape.row_count, np.int64)
        self._guessed: Int64 = np.zeros(shape.row_count, np.int64)  # in this step: other drafts were not fed

    def start(self, start: RowStart) -> None:
        self._written[start.row] = start.cached

    def update_pages(self, updates: list[tuple[Int32, Int32, Int32]]) -> None:
        self._model.update_pages(updates)

    def page_bytes(self) -> Sequence[PageBytes]:
        return self._model.page_bytes()

    def propose(self, sequences: Sequences, rows: Int64, limits: Int64) -> tuple[Int32, Int64]:
        self._guessed[rows] = limits
        found = np.zeros((len(rows), int(limits.max(initial=0))), np.int32)
        going = np.flatnonzero(limits > 0)
        for j in range(found.shape[1]):
            going = going[limits[going] > j]
            now, length = rows[going], sequences.length[rows[going]]
            if j == 0:
                hidden = self._forward_known(sequences, now, length)
            else:
                hidden = self._forward(now, length + j - 1, np.ones(len(now), np.int64), found[going, j - 1])
            logits = self._model.logits(hidden)
            for i, row in enumerate(now.tolist()):
                found[going[i], j] = self._sampler.guess(row, int(length[i]) + j, logits[i])
        # All fed tokens but the drafts are right; `follow` adds the accepted drafts.
        self._written[rows[limits > 0]] = sequences.length[rows[limits > 0]]
        return found, limits.copy()

    def follow(self, sequences: Sequences, work: Work, hidden: Float32, written: Int64) -> Int64:
        rows = work.rows
        # The last draft was proposed but never fed.
        guessed = np.minimum(work.proposed, self._guessed[rows])
        self._guessed[rows] = 0
        drafted = guessed > 0
        fed = work.starts + np.maximum(guessed, 1)
        self._written[rows[drafted]] = np.minimum(written, fed)[drafted]
        lag = written - self._written[rows]
        late = np.flatnonzero((~work.decodes & (lag > 0)) | (lag > self._lag_max))
        if len(late):
            self._forward_known(sequences, rows[late], written[late])
        return np.minimum(written, self._written[rows])

    def _forward_known(self, sequences: Sequences, rows: Int64, ends: Int64) -> Float32:
        """Compute missing tokens below `ends` [n] -> hidden states of the last tokens [n, features]."""
        starts = self._written[rows]
        tokens = [sequences.tokens[row, a:b] for row, a, b in zip(rows, starts, ends, strict=True)]
        hidden = self._forward(rows, starts, ends - starts, np.concatenate(tokens))
        self._written[rows] = ends
        return hidden[np.cumsum(ends - starts) - 1]

    def _forward(self, rows: Int64, starts: Int64, counts: Int64, tokens: Int32) -> Float32:
        return self._model.forward(tokens, self._model.batch(rows, starts, counts))

    def warm_up(self) -> float:
        zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        self._model.logits(self._forward(zero, zero, one, np.zeros(1, np.int32)))
        before = time.perf_counter()
        self._model.logits(self._forward(zero, zero, one, np.zeros(1, np.int32)))
        return time.perf_counter() - before
