"""Runs steps: the engine's own copy of page tables, its last tokens, the model and the sampler."""

from __future__ import annotations

import numpy as np

from freehold.arrays import Int32, Int64
from freehold.engine.cpu.backend import CpuBackend, CpuBatch, CpuKV
from freehold.engine.sampler import Sampler
from freehold.models.llama import LlamaDecoder
from freehold.models.spec import Checkpoint
from freehold.step import FROM_DEVICE, Step, StepResult


class CpuRunner:
    """Executes one step at a time. Owns no page: every slot it touches was named by the scheduler."""

    def __init__(self, checkpoint: Checkpoint, page_count: int, page_size: int, row_count: int, token_limit: int):
        spec = checkpoint.spec
        self._page_size = page_size
        self._backend = CpuBackend(spec, CpuKV(spec, page_count, page_size), token_limit)
        self._model = LlamaDecoder(checkpoint, self._backend)
        self._sampler = Sampler(row_count, spec.vocab_size)
        self._tables: Int32 = np.zeros((row_count, -(-token_limit // page_size)), np.int32)
        self._last: Int32 = np.zeros(row_count, np.int32)

    def run(self, step: Step) -> StepResult:
        """Compute all new tokens of the step, sample where asked."""
        for rows, columns, pages in step.page_updates:
            self._tables[rows, columns] = pages
        for start in step.row_starts:
            self._sampler.start(start)
        batch = CpuBatch.of(self._tables, self._page_size, step.rows, step.starts, step.counts)
        hidden = self._model.forward(self._input(step), batch)
        return self._sample(step, hidden)

    def _input(self, step: Step) -> Int32:
        rows = np.repeat(step.rows, step.counts)
        return np.where(step.tokens == FROM_DEVICE, self._last[rows], step.tokens)

    def _sample(self, step: Step, hidden: np.ndarray) -> StepResult:
        tokens: Int32 = np.full(len(step.rows), -1, np.int32)
        chosen = np.flatnonzero(step.samples)
        if len(chosen) == 0:
            return StepResult(tokens)
        ends: Int64 = np.cumsum(step.counts)
        logits = self._model.logits(np.ascontiguousarray(hidden[ends[chosen] - 1]))
        positions = step.starts[chosen] + step.counts[chosen]
        rows = step.rows[chosen]
        tokens[chosen], logprobs = self._sampler.sample(rows, positions, logits)
        self._last[rows] = tokens[chosen]
        return StepResult(tokens, {int(chosen[i]): found for i, found in logprobs.items()})
