"""Runs steps: the engine's own copy of page tables, its last tokens, the model and the sampler."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import numpy as np

from freehold.arrays import Int32, Int64
from freehold.engine.cpu.backend import CpuBackend, CpuBatch, CpuKV
from freehold.engine.sampler import Sampler
from freehold.models.llama import LlamaDecoder
from freehold.models.spec import Checkpoint
from freehold.sampling_params import SamplingParams
from freehold.step import FROM_DEVICE, RowStart, Step, StepResult

COMPILE_NOTICE_S = 2.0


@contextlib.contextmanager
def _notice_if_slow() -> Iterator[None]:
    """Kernels come from a cache in no time, except after an installation."""
    text = "freehold: compiling kernels for this machine (once, about half a minute) ..."
    timer = threading.Timer(COMPILE_NOTICE_S, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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

    def warm_up(self) -> None:
        """Compile every kernel, with a step on the padding page: nobody owns it, nobody reads it."""
        count = min(self._page_size, 7)
        params = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1, presence_penalty=0.1, logprobs=1)
        step = Step(
            number=0,
            rows=np.zeros(1, np.int64),
            starts=np.zeros(1, np.int64),
            counts=np.full(1, count, np.int64),
            tokens=np.zeros(count, np.int32),
            samples=np.ones(1, np.bool_),
            row_starts=[RowStart(0, params, 0, np.zeros(1, np.int32), 1, ())],
        )
        with _notice_if_slow():
            self.run(step)

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
