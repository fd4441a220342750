"""An engine that computes nothing and checks everything.

Each slot remembers the identity of the prefix that was written into it: a chained hash of namespace,
positions and tokens. Before a sequence computes, every slot it would read must hold exactly its own
prefix. The token it samples is a function of that prefix, so outputs can be predicted without running.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from freehold.arrays import Int32, Int64
from freehold.step import FROM_DEVICE, Step, StepResult

UInt64 = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1


class WrongKV(AssertionError):
    """A sequence would have read a slot that does not hold its own prefix."""


def _mix(state: int, token: int) -> int:
    state = (state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return state ^ (state >> 29)


@dataclass
class Prefix:
    """A sequence's tokens and the identity of each of its prefixes."""

    namespace: str
    tokens: list[int] = field(default_factory=list[int])
    identities: list[int] = field(default_factory=list[int])

    def append(self, token: int) -> None:
        if self.identities:
            state = self.identities[-1]
        else:
            state = int.from_bytes(self.namespace.encode()[:8].ljust(8, b"\1"), "little")
        self.tokens.append(token)
        self.identities.append(_mix(state, token))

    def next_token(self, vocab_size: int) -> int:
        """What the simulated model samples after this prefix."""
        return (self.identities[-1] >> 20) % vocab_size


def expected_output(prompt: Int32, count: int, vocab_size: int, namespace: str = "") -> list[int]:
    """What a cold run of the simulated model gives."""
    prefix = Prefix(namespace)
    for token in prompt.tolist():
        prefix.append(token)
    for _ in range(count):
        prefix.append(prefix.next_token(vocab_size))
    return prefix.tokens[len(prompt) :]


class SimulatedEngine:
    """Implements `freehold.step.Engine`. Steps run when they are submitted; with `hold` they complete
    only when `release` is called."""

    def __init__(self, page_count: int, page_size: int, row_count: int, token_limit: int, vocab_size: int = 1000):
        self.vocab_size = vocab_size
        self.hold = False
        self.fail_next: Exception | None = None
        self.steps_run = 0
        self._page_size = page_size
        self._slots: UInt64 = np.zeros((page_count + 1) * page_size, np.uint64)
        self._tables: Int32 = np.zeros((row_count, -(-token_limit // page_size)), np.int32)
        self._rows: list[Prefix] = [Prefix("") for _ in range(row_count)]
        self._broken: set[int] = set()  # rows whose sequence was in a step that failed
        self._held: deque[tuple[Future[StepResult], StepResult | Exception]] = deque()

    def execute(self, step: Step) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        outcome: StepResult | Exception
        if self.fail_next is not None:
            outcome, self.fail_next = self.fail_next, None
            self._apply_updates(step)
            self._broken.update(step.rows.tolist())
        else:
            outcome = self._run(step)
        self._held.append((future, outcome))
        if not self.hold:
            self.release()
        return future

    def release(self, count: int | None = None) -> None:
        """Complete the oldest `count` steps (all of them)."""
        for _ in range(len(self._held) if count is None else count):
            future, outcome = self._held.popleft()
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def shutdown(self) -> None:
        self.release()

    def _apply_updates(self, step: Step) -> None:
        for rows, columns, pages in step.page_updates:
            self._tables[rows, columns] = pages
        for start in step.row_starts:
            prefix = Prefix(start.namespace)
            for token in start.tokens.tolist():
                prefix.append(token)
            self._rows[start.row] = prefix
            self._broken.discard(start.row)

    def _run(self, step: Step) -> StepResult:
        self.steps_run += 1
        self._apply_updates(step)
        tokens: Int32 = np.full(len(step.rows), -1, np.int32)
        at = 0
        for i in range(len(step.rows)):
            row, start, count = int(step.rows[i]), int(step.starts[i]), int(step.counts[i])
            if row in self._broken:
                at += count
                continue
            prefix = self._rows[row]
            self._check_input(step, prefix, at, start, count)
            identities: UInt64 = np.array(prefix.identities[: start + count], np.uint64)
            slots = self._slots_of(row, start + count)
            self._check_reads(step, row, self._slots[slots[:start]], identities[:start])
            self._slots[slots[start:]] = identities[start:]
            if step.samples[i]:
                tokens[i] = prefix.next_token(self.vocab_size)
                prefix.append(int(tokens[i]))
            at += count
        return StepResult(tokens)

    def _slots_of(self, row: int, count: int) -> Int64:
        positions = np.arange(count)
        pages = self._tables[row, positions // self._page_size].astype(np.int64)
        if (pages == 0).any():
            raise WrongKV(f"row {row} has no page for position {int(np.argmax(pages == 0))}")
        return pages * self._page_size + positions % self._page_size

    def _check_input(self, step: Step, prefix: Prefix, at: int, start: int, count: int) -> None:
        given = step.tokens[at : at + count].tolist()
        own = prefix.tokens[start : start + count]
        if len(own) != count or any(a not in (b, FROM_DEVICE) for a, b in zip(given, own, strict=True)):
            raise WrongKV(f"step {step.number}: input tokens {given[:8]} are not the sequence's {own[:8]}")

    def _check_reads(self, step: Step, row: int, found: UInt64, own: UInt64) -> None:
        wrong = found != own
        if wrong.any():
            position = int(np.argmax(wrong))
            page = int(self._tables[row, position // self._page_size])
            raise WrongKV(f"step {step.number}, row {row}: position {position} (page {page}) holds other KV")


class InstantEngine:
    """For measuring the scheduler: every token is 1, at no cost."""

    def execute(self, step: Step) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        future.set_result(StepResult(np.where(step.samples, 1, -1).astype(np.int32)))
        return future

    def shutdown(self) -> None:
        """Nothing to end."""


def vocabulary_fields(vocab_size: int, eos_tokens: tuple[int, ...] = ()) -> dict[str, Any]:
    """Arguments for `Vocabulary`: token t is written as its number in angle brackets."""
    return {"size": vocab_size, "eos_tokens": eos_tokens, "token_bytes": [b"<%d>" % t for t in range(vocab_size)]}
