"""An engine that computes nothing and checks everything.

Each slot, in every cache group, remembers which prefix was written to it and by which weights. Before a sequence
computes, every slot it would read must hold exactly its own prefix. Drafts are random and verified like a model's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from freehold.contract.arrays import Float64, Int32, Int64
from freehold.contract.errors import ModelUnavailable
from freehold.contract.step import RowStart, Step, StepResult, TokenLogprobs
from freehold.memory import CacheGroup
from freehold.simulation.model import (
    FREE,
    NO_PAGE,
    OK,
    STATE,
    WRONG_INPUT,
    WRONG_KV,
    WRONG_START,
    Answers,
    Rules,
    Sequences,
    SimulatedGrammar,
    Slots,
    UInt64,
    digest,
    extend_identities,
    logprob_of,
    pooled,
    run_step,
    seed_of,
    use_pages,
)

# Weights that can't be loaded, with the error: one of ours, one of a library.
TORN: dict[str, Exception] = {"alien": ModelUnavailable("another model's"), "torn": ValueError("half a file")}


class WrongKV(AssertionError):
    """A sequence would have read a slot that does not hold its own prefix, at `page`."""

    def __init__(self, message: str, page: int):
        super().__init__(message)
        self.page = page


@dataclass(frozen=True)
class EngineShape:
    """Size of the simulated engine, and how it computes (`SimulatedModel`)."""

    page_count: int
    page_size: int
    row_count: int
    token_limit: int
    vocab_size: int = 1000
    groups: Sequence[CacheGroup] = (CacheGroup(),)
    draft_rate: float = 0.6
    eos_token: int = -1  # ends a bound text
    token_seconds: float = 0.0

    @property
    def lookbacks(self) -> Int64:
        """Lookbacks as `compute` takes them."""
        return np.array([STATE if group.is_state else group.lookback or 0 for group in self.groups], np.int64)


class StepFuture(Future[Any]):
    """Completes as late as possible: when its result is asked for."""

    def __init__(self, ask: Callable[[], None]):
        super().__init__()
        self._ask = ask

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._ask()
        if not self.done():
            raise TimeoutError  # simulated time does not pass while waiting
        return super().exception(timeout)


@dataclass
class _Queued:
    step: Step
    future: StepFuture
    failure: Exception | None


class SimulatedEngine:
    """Implements `freehold.contract.step.Engine`. A step runs when its result is asked for, so that anything the
    scheduler did too early is detected; with `hold` not before `release` is called."""

    def __init__(self, shape: EngineShape):
        self.shape = shape
        self.hold = False
        self.observe: Callable[[Step], None] = lambda step: None  # sees each step before it runs
        self.fail_next: Exception | None = None
        self.steps_run = 0
        self.weights = 0
        width, group_count = -(-shape.token_limit // shape.page_size), len(shape.groups)
        self._lookbacks = shape.lookbacks
        slots, limit = (shape.page_count + 1) * shape.page_size, shape.token_limit + 1
        self._slots: UInt64 = np.zeros((group_count, slots), np.uint64)
        self._tables: Int32 = np.zeros((group_count, shape.row_count, width), np.int32)
        self._planned_tables: Int32 = self._tables.copy()  # those of the newest step, which has not run yet
        self._planned_limit: Int64 = np.zeros(shape.row_count, np.int64)  # upper bound of tokens with KV
        self._used_by_step: Int64 = np.zeros((group_count, shape.page_count + 1), np.int64)
        self._used_by_row: Int64 = np.zeros((group_count, shape.page_count + 1), np.int64)
        rows = shape.row_count
        self._sequences = Sequences(
            tables=self._tables, tokens=np.zeros((rows, limit), np.int32),
            identities=np.zeros((rows, limit), np.uint64), written_by=np.zeros((rows, limit), np.int32),
            forms=np.tile(FREE, (rows, 1)), length=np.zeros(rows, np.int64), max_length=np.zeros(rows, np.int64),
            last_drafts=np.zeros(rows, np.int64), broken=np.zeros(rows, np.bool_),
        )  # fmt: skip
        self._starts: dict[int, RowStart] = {}  # rows with requested log-probabilities or embedding
        self._queue: deque[_Queued] = deque()
        self._completed = 0

    def execute(self, step: Step) -> Future[StepResult]:
        for table, (rows, columns, pages) in zip(self._planned_tables, step.page_updates, strict=True):
            table[rows, columns] = pages
        for start in step.row_starts:
            self._planned_limit[start.row] = start.max_length - 1
        ends = np.minimum(step.starts + step.counts + step.drafts, self._planned_limit[step.rows])
        page, group, other = use_pages(
            step.number, self._completed, step.rows, step.starts, ends, self._planned_tables,
            self.shape.page_size, self._used_by_step, self._used_by_row,
        )  # fmt: skip
        if page:
            raise WrongKV(f"step {step.number} writes page {page} (group {group}), which step {other} still uses", page)
        future = StepFuture(self._asked)
        self.observe(step)
        self._queue.append(_Queued(step, future, self.fail_next))
        self.fail_next = None
        return future

    def load_weights(self, source: str) -> Future[bytes]:
        """Load weights number `source`, or new ones. The slots keep what the old ones wrote, which is wrong for a
        sequence that starts over. Sources in TORN fail."""
        self.release()
        future: Future[bytes] = Future()
        if source in TORN:
            future.set_exception(TORN[source])
            return future
        self.weights = int(source) if source.isdigit() else self.weights + 1
        future.set_result(b"%d" % self.weights)
        return future

    def _asked(self) -> None:
        if not self.hold:
            self.release(1)

    def release(self, count: int | None = None) -> None:
        """Run and complete the oldest `count` steps, or all."""
        for _ in range(len(self._queue) if count is None else count):
            queued = self._queue.popleft()
            self._apply_updates(queued.step)
            self._completed = queued.step.number
            if queued.failure is not None:
                self._sequences.broken[queued.step.rows] = True
                queued.future.set_exception(queued.failure)
            else:
                queued.future.set_result(self._run(queued.step))

    def fail_oldest(self, error: Exception) -> None:
        """Fail and complete the oldest step."""
        self._queue[0].failure = error
        self.release(1)

    def queued_steps(self) -> list[tuple[list[int], ...]]:
        """Return rows, starts, counts, samples and drafts of each step that has not run."""
        return [
            tuple(column.tolist() for column in (step.rows, step.starts, step.counts, step.samples, step.drafts))
            for step in (queued.step for queued in self._queue)
        ]

    def planned_table(self, group: int) -> Int32:
        """Return the page table as the newest step will find it, int32 [rows, columns]."""
        return self._planned_tables[group]

    def content(self, page: int, group: int) -> bytes:
        """Return the content of a page's slots."""
        size = self.shape.page_size
        return self._slots[group, page * size : (page + 1) * size].tobytes()

    def slots(self, group: int) -> UInt64:
        """Return the content of each slot of a group, uint64 [pages, slots] (a view)."""
        return self._slots[group].reshape(-1, self.shape.page_size)

    def pages_in_use(self, group: int, pages: Int32) -> list[int]:
        """Return those of `pages` [n] that an incomplete step uses."""
        return pages[self._used_by_step[group, pages] > self._completed].tolist()

    def poison(self, pages: Int32, group: int = 0) -> None:
        """Overwrite free pages, so that reading one is detected."""
        size = self.shape.page_size
        self._slots[group].reshape(-1, size)[pages] = 0

    def shutdown(self) -> None:
        self.release()

    def _apply_updates(self, step: Step) -> None:
        for table, (rows, columns, pages) in zip(self._tables, step.page_updates, strict=True):
            table[rows, columns] = pages
        of = self._sequences
        for start in step.row_starts:
            row, count = start.row, len(start.tokens)
            of.tokens[row, :count] = start.tokens
            seed = seed_of(start.namespace, start.adapter)
            extend_identities(of.identities[row], of.tokens[row], 0, count, seed)
            of.written_by[row, : start.cached] = self.weights
            of.length[row], of.max_length[row], of.broken[row], of.forms[row] = count, start.max_length, False, FREE
            if isinstance(start.grammar, SimulatedGrammar):
                of.forms[row] = start.grammar.form(start.prompt_length)
                digest(of.forms[row], start.tokens[start.prompt_length :])
            self._starts.pop(row, None)
            if start.params.logprobs is not None or start.params.pooling is not None:
                self._starts[row] = start

    def _run(self, step: Step) -> StepResult:
        self.steps_run += 1
        shape, size = self.shape, len(step.rows)
        tokens = np.zeros(int((step.samples * (1 + step.drafts)).sum()), np.int32)
        counts, written, proposed = (np.zeros(size, np.int64) for _ in range(3))
        refused = np.zeros(size, np.bool_)
        slots = Slots(self._slots, self._lookbacks, shape.page_size)
        rules = Rules(self.weights, shape.vocab_size, int(shape.draft_rate * 100), shape.eos_token)
        answers = Answers(tokens, counts, written, proposed, refused)
        verdict, row, position, group = run_step(step.planned, slots, self._sequences, rules, answers)
        if verdict != OK:
            self._raise(step, verdict, row, position, group)
        tokens = tokens[: int(counts.sum())]
        why = dict.fromkeys(np.flatnonzero(refused).tolist(), "told to fail")
        logprobs, scores = self._logprobs(step, counts), self._scores(step)
        states, seconds = self._pooled(step), self._seconds(step)
        return StepResult(tokens, counts, written, proposed, logprobs, scores, states, seconds, why)

    def _seconds(self, step: Step) -> float:
        """Return the reported step time: every third step is disturbed."""
        if self.shape.token_seconds == 0.0:
            return 0.0
        rows, tokens = len(step.rows), int(step.counts[~step.decodes].sum())
        return (0.003 + 0.0001 * rows + self.shape.token_seconds * tokens) * (1.5 if step.number % 3 == 0 else 1.0)

    def _logprobs(self, step: Step, counts: Int64) -> dict[int, TokenLogprobs]:
        """Return log-probabilities of sampled tokens, by index of the step's tokens."""
        found: dict[int, TokenLogprobs] = {}
        ends = counts.cumsum()
        for i, row in enumerate(step.rows.tolist()):
            start = self._starts.get(row)
            if start is not None and start.params.logprobs is not None and not self._sequences.broken[row]:
                length = int(self._sequences.length[row])
                for j in range(int(counts[i])):
                    found[int(ends[i]) - 1 - j] = self._logprob(row, length - 1 - j)
        return found

    def _scores(self, step: Step) -> dict[int, list[TokenLogprobs]]:
        """Return scores of prompt tokens after the computed ones, by index of the sequence."""
        found: dict[int, list[TokenLogprobs]] = {}
        for i, row in enumerate(step.rows.tolist()):
            if row in self._starts and not self._sequences.broken[row]:
                asked, start = self._starts[row], int(step.starts[i])
                first = max(start, asked.scored_from)
                end = min(start + int(step.counts[i]), asked.prompt_length - 1)
                if first < end:
                    found[i] = [self._logprob(row, at + 1) for at in range(first, end)]
        return found

    def _pooled(self, step: Step) -> dict[int, tuple[int, Float64]]:
        """Return the count of prompt tokens computed for an embedding, and the sum of their states, by index of the
        sequence."""
        found: dict[int, tuple[int, Float64]] = {}
        for i, row in enumerate(step.rows.tolist()):
            if row in self._starts and not self._sequences.broken[row]:
                asked, start = self._starts[row], int(step.starts[i])
                first, end = max(start, asked.pooled_from), min(start + int(step.counts[i]), asked.prompt_length)
                if first < end:
                    found[i] = end - first, pooled(self._sequences.identities[row, first:end])
        return found

    def _logprob(self, row: int, position: int) -> TokenLogprobs:
        token = int(self._sequences.tokens[row, position])
        return TokenLogprobs(token, logprob_of(self._sequences.identities[row, position]), [])

    def _raise(self, step: Step, verdict: int, row: int, position: int, group: int) -> None:
        page = int(self._tables[group, row, position // self.shape.page_size])
        what = {
            WRONG_KV: f"page {page} holds other KV",
            NO_PAGE: "there is no page",
            WRONG_INPUT: f"a chunk goes past the {int(self._sequences.length[row])} tokens that the row has",
            WRONG_START: f"it is planned to go on, but it has {int(self._sequences.length[row])} tokens",
        }[verdict]
        raise WrongKV(f"step {step.number}, row {row}, group {group}, position {position}: {what}", page)


class _Answered(Future[StepResult]):
    """A future with a known answer: without waiting it needs no lock."""

    def __init__(self, answer: StepResult):
        self._answer = answer

    def exception(self, timeout: float | None = None) -> None:
        return None

    def result(self, timeout: float | None = None) -> StepResult:
        return self._answer


class InstantEngine:
    """Measures the scheduler alone: every token is 1, at almost no cost."""

    def execute(self, step: Step) -> Future[StepResult]:
        tokens = np.ones(np.count_nonzero(step.samples), np.int32)
        proposed = np.zeros(len(step.rows), np.int64)
        return _Answered(StepResult(tokens, step.samples.astype(np.int64), step.starts + step.counts, proposed))

    def load_weights(self, source: str) -> Future[bytes]:
        raise NotImplementedError("the instant engine has no weights")

    def shutdown(self) -> None:
        """Do nothing: there is nothing to end."""


def vocabulary_fields(vocab_size: int, eos_tokens: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return arguments for `Vocabulary`: token t is written as its number in angle brackets."""
    return {"size": vocab_size, "eos_tokens": eos_tokens, "token_bytes": [b"<%d>" % t for t in range(vocab_size)]}
