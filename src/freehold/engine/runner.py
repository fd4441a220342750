"""Runs steps with the engine's own page tables, last tokens, model and sampler."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from freehold.config import EngineConfig
from freehold.contract.arrays import Float32, Float64, Int32, Int64
from freehold.contract.sampling_params import SamplingParams
from freehold.contract.step import DraftCost, KVShape, RowStart, Step, StepResult, StepTiming, TokenLogprobs
from freehold.engine.adapters import AdapterRows, Adapters
from freehold.engine.device import Device, PageBytes
from freehold.engine.engine import completed
from freehold.engine.grammar.matchers import Masks, Matchers
from freehold.engine.placed_model import PlacedModel
from freehold.engine.sampler import Sampler
from freehold.engine.sequences import Sequences, Work
from freehold.engine.speculative.choice import make_speculator
from freehold.models.loading.content import content_fingerprint
from freehold.models.loading.resolve import open_weights
from freehold.models.tensor import Checkpoint

COST_TOKENS = 8
TIMED_ROWS = 16
TIMED_TOKENS = 16
SCORED_AT_ONCE = 64  # positions whose logits are in memory at once
OVERHEAD_TOKENS_MAX = 64.0  # larger measurements are noise


class Runner:
    """Executes one step at a time. Owns no page: the scheduler names every slot. `weights` replace the model's; the
    draft model and adapters' tensor names remain the model's."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, shape: KVShape, device: Device,
        eos_tokens: tuple[int, ...] = (), weights: Checkpoint | None = None,
    ):  # fmt: skip
        self._config = config
        self._device = device
        layouts = checkpoint.spec.cache_layouts()
        own = replace(shape, page_counts=shape.page_counts[: len(layouts)])
        self._model = PlacedModel(weights or checkpoint, device, own, layouts, config.linear_compute, config.adapts)
        self.adapters = Adapters(self._model, checkpoint, config.max_loras) if config.adapts else None
        self._adapter_rows = AdapterRows()
        self._sampler = Sampler(shape.row_count, checkpoint.spec.vocab_size, device.drawing)
        self._matchers = Matchers(shape.row_count, checkpoint.spec.vocab_size, eos_tokens)
        self._sequences = Sequences(shape.row_count, shape.token_limit)
        self._speculator = make_speculator(config, checkpoint, shape, device, self._sampler)
        self._forced_limit = config.forced_limit
        self.draft_cost: DraftCost | None = None  # set by `warm_up`
        self.timings: list[StepTiming] = []  # likewise

    def prepare_thread(self) -> None:
        """Prepare the thread that runs the steps. Called once, in that thread."""
        self._device.prepare_thread()

    def warm_up(self) -> None:
        """Compile all kernels with a step on the padding page, which is never read. Measure a few steps and, if
        enabled, speculation."""
        params = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1, presence_penalty=0.1, logprobs=1)
        with self._device.preparation():
            self._device.drawing.mask(np.zeros(32, np.float32), np.zeros(1, np.uint32))
            self._run(_padding_step(1, 7, params))
            self.timings = [self._time(rows, tokens) for rows, tokens in self._sizes()]
            if self._speculator is not None or self._forced_limit:
                self.draft_cost = self._measure()

    def _sizes(self) -> list[tuple[int, int]]:
        """Return the rows and tokens of the steps to measure."""
        return [(1, 1), (min(TIMED_ROWS, self._config.max_running_requests), 1), (1, TIMED_TOKENS)]

    def _time(self, rows: int, tokens: int) -> StepTiming:
        greedy = SamplingParams(temperature=0)
        seconds = _seconds(lambda: self._run(_padding_step(rows, tokens, greedy)))
        return StepTiming(rows, 0, seconds) if tokens == 1 else StepTiming(0, tokens, seconds)

    def _measure(self) -> DraftCost:
        """Measure draft costs. A step of n tokens takes about `base + n * more`."""
        greedy = SamplingParams(temperature=0)
        one, many = (_seconds(lambda n=n: self._run(_padding_step(1, n, greedy))) for n in (1, COST_TOKENS))
        more = max(many - one, one / 1000) / (COST_TOKENS - 1)
        speculator = self._speculator
        return DraftCost(
            limit=0 if speculator is None else self._config.speculative_num_draft_tokens,
            overhead_tokens=min(max(one / more - 1, 0.0), OVERHEAD_TOKENS_MAX),
            proposal=0.0 if speculator is None else speculator.warm_up() / one,
            forced=self._forced_limit,
        )

    def load_weights(self, source: str) -> bytes:
        """Load other weights. Return their content's fingerprint if pages are keyed by it, since it requires reading
        them all. Raises ModelUnavailable, or ValueError for another shape, leaving everything unchanged."""
        checkpoint = open_weights(source, self._model.spec)
        found = content_fingerprint(checkpoint.path) if self._config.enable_hierarchical_cache else b""
        self._model.load(checkpoint)
        return found

    def page_bytes(self) -> list[PageBytes]:
        """Return the page copier of each cache group, a draft model's last."""
        drafts = [] if self._speculator is None else self._speculator.page_bytes()
        return [*self._model.page_bytes(), *drafts]

    def launch(self, step: Step) -> Future[StepResult]:
        """Compute all new tokens of the step, and sample where requested. A device without queues is done on return."""
        return completed(self._run(step))

    def _run(self, step: Step) -> StepResult:
        started = time.perf_counter()
        if step.page_updates:
            self._model.update_pages(step.page_updates[: self._model.group_count])
        for start in step.row_starts:
            self._sequences.start(start)
            self._sampler.start(start)
            self._matchers.start(start)
            self._adapter_rows.start(start)
        work = self._sequences.take_up(step, *self._propose(step))
        masks = self._matchers.begin(work)
        batch = self._model.batch(work.rows, work.starts, work.sizes, work.proposed)
        hidden = self._model.forward(work.tokens, batch, self._adapter_rows.parts(work.rows, work.sizes))
        return self._conclude(work, batch, hidden, None if masks is None else masks.result(), started)

    def _propose(self, step: Step) -> tuple[Int32, Int64]:
        """Return drafts int32 [sequences, k] and their counts [sequences]: tokens forced by a grammar, or else
        guesses."""
        speculator, rows = self._speculator, step.rows
        if speculator is not None:
            if updates := step.page_updates[self._model.group_count :]:
                speculator.update_pages(updates)
            for start in step.row_starts:
                speculator.start(start)
        limits = self._sequences.room(step)
        if not limits.any():
            return np.zeros((len(rows), 0), np.int32), limits
        forced, counts = self._matchers.forced(rows, limits)
        if speculator is None:
            return forced, counts
        is_free = counts == 0
        guessed, guesses = speculator.propose(self._sequences, rows, np.where(is_free, limits, 0))
        drafts = np.zeros((len(rows), int(limits.max())), np.int32)
        drafts[:, : guessed.shape[1]] = guessed
        drafts[~is_free] = forced[~is_free]
        return drafts, np.where(is_free, self._matchers.cut(rows, drafts, guesses), counts)

    def _conclude(
        self, work: Work, batch: Any, hidden: Float32, masks: Masks | None, started: float
    ) -> StepResult:  # fmt: skip
        """Sample, append, and report each sequence's progress in a step that began at `started`."""
        counts, tokens, logprobs = np.zeros(len(work.rows), np.int64), np.empty(0, np.int32), {}
        written = work.starts + work.counts
        refused = {} if masks is None else {int(work.chosen[i]): why for i, why in masks.refused.items()}
        if len(work.chosen):
            of = work.chosen
            rows, drafts, proposed = work.rows[of], work.drafts[of], work.proposed[of]
            logits = self._model.logits(hidden[work.sampled_at])
            tokens, sampled, logprobs = self._sampler.sample(rows, written[of], logits, drafts, proposed, masks)
            counts[of] = sampled
            self._sequences.append(rows, sampled, tokens)
            self._matchers.advance(rows, sampled, tokens)
        for i in refused:
            self._sequences.end(int(work.rows[i]))
        written += np.maximum(counts - 1, 0)
        self._model.settle(batch, written)
        if self._speculator is not None:
            written = self._speculator.follow(self._sequences, work, hidden, written)
        scores, pooled = self._observe(work, hidden)
        seconds = time.perf_counter() - started
        return StepResult(tokens, counts, written, work.proposed, logprobs, scores, pooled, seconds, refused)

    def _observe(
        self, work: Work, hidden: Float32
    ) -> tuple[dict[int, list[TokenLogprobs]], dict[int, tuple[int, Float64]]]:
        """Return scores and pooled states of the step's prompt tokens."""
        if not self._sequences.observed:
            return {}, {}
        return self._scores(work, hidden), self._pooled(work, hidden)

    def _pooled(self, work: Work, hidden: Float32) -> dict[int, tuple[int, Float64]]:
        """Return sums of hidden states of prompt tokens, by sequence."""
        pooled: dict[int, tuple[int, Float64]] = {}
        ends = work.starts + work.counts
        for i in np.flatnonzero(ends > self._sequences.pooled_from[work.rows]).tolist():
            start = int(work.starts[i])
            first, end = self._sequences.pooled_range(int(work.rows[i]), start, int(ends[i]))
            if first < end:
                offset = int(work.sizes[:i].sum()) - start
                states = self._model.final(hidden[offset + first : offset + end])
                pooled[i] = end - first, states.sum(axis=0, dtype=np.float64)
        return pooled

    def _scores(self, work: Work, hidden: Float32) -> dict[int, list[TokenLogprobs]]:
        """Return log-probabilities of prompt tokens, by sequence, in small chunks because logits are large."""
        scores: dict[int, list[TokenLogprobs]] = {}
        ends = work.starts + work.counts
        for i in np.flatnonzero(ends > self._sequences.scored_from[work.rows]).tolist():
            row, start = int(work.rows[i]), int(work.starts[i])
            first, end = self._sequences.scored_range(row, start, int(ends[i]))
            offset = int(work.sizes[:i].sum()) - start
            for at in range(first, end, SCORED_AT_ONCE):
                to = min(at + SCORED_AT_ONCE, end)
                logits = self._model.logits(hidden[offset + at : offset + to])
                following = self._sequences.tokens[row, at + 1 : to + 1]
                scores.setdefault(i, []).extend(self._sampler.score(row, logits, following))
        return scores


def _padding_step(rows: int, count: int, params: SamplingParams) -> Step:
    """Return a step of `count` tokens in each of `rows` rows, whose KV goes to the padding page."""
    return Step(
        number=0,
        rows=np.arange(rows),
        starts=np.zeros(rows, np.int64),
        counts=np.full(rows, count, np.int64),
        decodes=np.zeros(rows, np.bool_),
        samples=np.ones(rows, np.bool_),
        drafts=np.zeros(rows, np.int64),
        row_starts=[RowStart(row, params, 0, np.zeros(count, np.int32), count, (), 1 << 30) for row in range(rows)],
    )


def _seconds(run: Callable[[], object]) -> float:
    """Return the best of three timings."""
    times: list[float] = []
    for _ in range(3):
        before = time.perf_counter()
        run()
        times.append(time.perf_counter() - before)
    return min(times)
