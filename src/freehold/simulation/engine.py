"""An engine that computes nothing and checks everything.

Each slot, in every cache group, remembers which prefix was written into it and by which weights. Before a
sequence computes, every slot that it would read must hold exactly its own prefix. Drafts are proposed by
chance and verified like a model's.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from freehold.arrays import Int32, Int64
from freehold.simulation.model import (
    OK,
    WRONG_KV,
    UInt64,
    extend_identities,
    mix,
    next_token,
    read_and_write,
    seed_of,
)
from freehold.step import FROM_DEVICE, Step, StepResult


class WrongKV(AssertionError):
    """A sequence would have read a slot that does not hold its own prefix. `page` is where."""

    def __init__(self, message: str, page: int):
        super().__init__(message)
        self.page = page


@dataclass(frozen=True)
class EngineShape:
    """How much the simulated engine holds. `draft_rate` of the drafts are right."""

    page_count: int
    page_size: int
    row_count: int
    token_limit: int
    vocab_size: int = 1000
    group_count: int = 1
    draft_rate: float = 0.6


class SimulatedEngine:
    """Implements `freehold.step.Engine`. Steps run when they are submitted; with `hold` they complete
    only when `release` is called."""

    def __init__(self, shape: EngineShape):
        self.shape = shape
        self.hold = False
        self.fail_next: Exception | None = None
        self.steps_run = 0
        self.tokens_checked = 0
        self.weights = 0
        width = -(-shape.token_limit // shape.page_size)
        slots = (shape.page_count + 1) * shape.page_size
        self._slots: list[UInt64] = [np.zeros(slots, np.uint64) for _ in range(shape.group_count)]
        self._tables: list[Int32] = [np.zeros((shape.row_count, width), np.int32) for _ in range(shape.group_count)]
        limit = shape.token_limit + 1
        self._tokens: Int32 = np.zeros((shape.row_count, limit), np.int32)
        self._identities: UInt64 = np.zeros((shape.row_count, limit), np.uint64)
        self._written_by: Int32 = np.zeros((shape.row_count, limit), np.int32)
        self._length: Int64 = np.zeros(shape.row_count, np.int64)  # tokens known
        self._max_length: Int64 = np.zeros(shape.row_count, np.int64)
        self._broken: set[int] = set()  # rows whose sequence was in a step that failed
        self._held: deque[tuple[Future[Any], Any]] = deque()

    def execute(self, step: Step) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self._apply_updates(step)
        if self.fail_next is not None:
            outcome, self.fail_next = self.fail_next, None
            self._broken.update(step.rows.tolist())
        else:
            outcome = self._run(step)
        self._complete(future, outcome)
        return future

    def load_weights(self, source: str) -> Future[None]:
        """The slots keep what the old weights wrote, and it counts as wrong for whoever starts anew."""
        future: Future[None] = Future()
        self.weights += 1
        self._complete(future, None)
        self.release()
        return future

    def _complete(self, future: Future[Any], outcome: Any) -> None:
        self._held.append((future, outcome))
        if not self.hold:
            self.release()

    @property
    def held_count(self) -> int:
        return len(self._held)

    def release(self, count: int | None = None) -> None:
        """Complete the oldest `count` steps (all of them)."""
        for _ in range(len(self._held) if count is None else count):
            future, outcome = self._held.popleft()
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def poison(self, pages: Int32, group: int = 0) -> None:
        """Overwrite free pages: whoever still reads them is found out."""
        size = self.shape.page_size
        self._slots[group].reshape(-1, size)[pages] = 0

    def shutdown(self) -> None:
        self.release()

    def _apply_updates(self, step: Step) -> None:
        for table, (rows, columns, pages) in zip(self._tables, step.page_updates, strict=True):
            table[rows, columns] = pages
        for start in step.row_starts:
            row, count = start.row, len(start.tokens)
            self._tokens[row, :count] = start.tokens
            extend_identities(self._identities[row], self._tokens[row], 0, count, seed_of(start.namespace))
            self._written_by[row, : start.cached] = self.weights
            self._length[row] = count
            self._max_length[row] = start.max_length
            self._broken.discard(row)

    def _run(self, step: Step) -> StepResult:
        self.steps_run += 1
        size = len(step.rows)
        sampled: list[int] = []
        counts, written, proposed = (np.zeros(size, np.int64) for _ in range(3))
        at = 0
        planned = zip(step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True)
        for i, (row, start, count) in enumerate(planned):
            given = step.tokens[at : at + count]
            at += count
            if row in self._broken:
                counts[i], written[i] = int(step.samples[i]), start + count
                sampled.extend([0] * int(counts[i]))
                continue
            if given[0] == FROM_DEVICE:
                start, count = self._take_up(step, i, row, start)
            else:
                self._check_input(step, row, start, given)
            if count == 0:
                written[i] = self._length[row] - 1
                continue
            self._compute(step, row, start, start + count)
            written[i] = start + count
            if step.samples[i]:
                new, proposed[i] = self._sample(step, row, int(step.drafts[i]))
                sampled.extend(new)
                counts[i] = len(new)
                written[i] = start + count + len(new) - 1
        return StepResult(np.array(sampled, np.int32), counts, written, proposed)

    def _take_up(self, step: Step, i: int, row: int, start: int) -> tuple[int, int]:
        """Where a decoding row really is -> (start, count), count 0 if it is full."""
        length = int(self._length[row])
        if length > self._max_length[row]:
            raise WrongKV(f"step {step.number}, row {row}: {length} tokens, more than allowed", 0)
        if start < min(length, int(self._max_length[row]) - 1) - 1:
            raise WrongKV(f"step {step.number}, row {row}: planned from {start}, has {length} tokens", 0)
        return length - 1, int(length < self._max_length[row])

    def _check_input(self, step: Step, row: int, start: int, given: Int32) -> None:
        own = self._tokens[row, start : start + len(given)]
        if start + len(given) > self._length[row] or not np.array_equal(own, given):
            raise WrongKV(f"step {step.number}, row {row}: input {given[:8]} at {start} is not its own {own[:8]}", 0)

    def _compute(self, step: Step, row: int, start: int, end: int) -> None:
        self._written_by[row, start:end] = self.weights
        self.tokens_checked += end
        for group, (slots, table) in enumerate(zip(self._slots, self._tables, strict=True)):
            verdict, position = read_and_write(
                slots, table[row], self.shape.page_size, self._identities[row], self._written_by[row], start, end
            )
            if verdict != OK:
                page = int(table[row, position // self.shape.page_size])
                what = f"page {page} holds other KV" if verdict == WRONG_KV else "there is no page"
                raise WrongKV(f"step {step.number}, row {row}, group {group}: at position {position} {what}", page)

    def _sample(self, step: Step, row: int, drafts: int) -> tuple[list[int], int]:
        """One token, and as many more as there are right drafts. Every draft writes KV, right or wrong.
        -> (tokens, drafts proposed)."""
        new: list[int] = []
        length = int(self._length[row])
        drafts = min(drafts, int(self._max_length[row]) - length - 1)
        if drafts > 0 and int(self._identities[row, length - 1]) % 4 == 0:
            drafts //= 2  # sometimes one can't think of as many
        identities = self._identities[row]
        right = True
        while right and len(new) <= drafts:
            identity = identities[length - 1]
            token = int(next_token(identity, self.shape.vocab_size))
            right = int(identity >> np.uint64(7)) % 100 < self.shape.draft_rate * 100
            identities[length], self._tokens[row, length] = mix(identity, token), token
            new.append(token)
            length += 1
            if right and len(new) <= drafts:
                self._compute(step, row, length - 1, length)
        rejected = slice(length - 1, length - 1 + max(drafts - len(new) + 1, 0))
        true, identities[rejected] = identities[rejected].copy(), 1
        if rejected.stop > rejected.start:
            self._compute(step, row, rejected.start, rejected.stop)
        identities[rejected] = true
        self._length[row] = length
        return new, drafts


class InstantEngine:
    """For measuring the scheduler: every token is 1, at no cost."""

    def execute(self, step: Step) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        counts = step.samples.astype(np.int64)
        tokens = np.ones(int(counts.sum()), np.int32)
        future.set_result(StepResult(tokens, counts, step.starts + step.counts, np.zeros_like(counts)))
        return future

    def load_weights(self, source: str) -> Future[None]:
        raise NotImplementedError("there are none")

    def shutdown(self) -> None:
        """Nothing to end."""


def vocabulary_fields(vocab_size: int, eos_tokens: tuple[int, ...] = ()) -> dict[str, Any]:
    """Arguments for `Vocabulary`: token t is written as its number in angle brackets."""
    return {"size": vocab_size, "eos_tokens": eos_tokens, "token_bytes": [b"<%d>" % t for t in range(vocab_size)]}
