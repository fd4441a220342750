"""Compiles grammars in a low-priority thread, and caches them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from freehold.contract.constraint import GRAMMAR_BYTES_MAX, Constraint
from freehold.contract.errors import InvalidParameter, Unavailable
from freehold.engine.grammar.tokens import TokenText, grammar_tokenizer

# Limits on a lexer step: they keep a mask below about 30 ms for any expression.
INITIAL_LEXER_FUEL, STEP_LEXER_FUEL = 100_000, 20_000
GRAMMARS_MAX = 256
GRAMMAR_BYTES = 70_000  # size of a small compiled grammar
FAILURES_MAX = 32
ABANDONED_MAX = 2
NICENESS = 10
SETTLE_S = 0.05
PATIENCE = 4  # times the CPU timeout that compiling may take in wall time


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """The data for a row to follow a grammar from its start."""

    prototype: LLMatcher
    field: str

    def matcher(self) -> LLMatcher:
        """Return a new matcher. Matchers share only what they learn of the grammar."""
        return self.prototype.deep_copy()


Compiled = Future[CompiledGrammar]


@dataclass
class _Job:
    """A grammar waiting for the thread, or in it since `begun`."""

    constraint: Constraint
    compiled: Compiled
    begun: _Clocks | None = None


@dataclass(frozen=True)
class _Clocks:
    """CPU seconds `computed` by a thread, and wall seconds `passed`."""

    computed: float
    passed: float


class Grammars:
    """Compiles each text once. Called by one thread; futures are completed by another. `timeout` is the CPU seconds for
    one grammar. A thread that exceeds it is abandoned, since it can't be stopped."""

    def __init__(self, tokenizer: TokenText, vocab_size: int, timeout: float, cache_bytes: int):
        self._source = tokenizer, vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._timeout = timeout
        self._kept_max = min(GRAMMARS_MAX, cache_bytes // GRAMMAR_BYTES)
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()
        self._failures: OrderedDict[bytes, str] = OrderedDict()
        self._underway: dict[bytes, _Job] = {}
        self._worker: _Worker | None = None
        self._abandoned: list[_Worker] = []

    def get(self, constraint: Constraint) -> Compiled:
        """Return a future, which may raise InvalidParameter naming the constraint's field. Raises Unavailable if too
        many compilers hang."""
        raw = constraint.grammar.encode()
        if len(raw) > GRAMMAR_BYTES_MAX:
            return _failed(constraint, f"has more than {GRAMMAR_BYTES_MAX >> 10} KiB as a grammar")
        key = hashlib.sha256(raw).digest()
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        if (failure := self._failures.get(key)) is not None:
            return _failed(constraint, failure)
        if (underway := self._underway.get(key)) is not None:
            return underway.compiled
        self._abandoned = [worker for worker in self._abandoned if worker.is_busy]
        if len(self._abandoned) >= ABANDONED_MAX:
            raise Unavailable("grammars take too long to compile: try again later")
        job = self._underway[key] = _Job(constraint, Future())
        self._submit(job)
        return job.compiled

    def settle(self) -> None:
        """Cache finished grammars and abandon late ones. Call this regularly while any is pending."""
        for key, job in list(self._underway.items()):
            if not job.compiled.done() and job.begun is not None and self._is_late(job.begun):
                self._abandon(job)
            if job.compiled.done():
                del self._underway[key]
                self._keep(key, job.compiled)

    def _is_late(self, begun: _Clocks) -> bool:
        """Return whether a job is late. CPU time counts, since a low-priority thread may wait long for a core."""
        assert self._worker is not None
        now = self._worker.clocks()
        return now.computed - begun.computed > self._timeout or now.passed - begun.passed > PATIENCE * self._timeout

    def result(self, constraint: Constraint) -> CompiledGrammar:
        """Wait for a grammar. Raises InvalidParameter or Unavailable."""
        compiled = self.get(constraint)
        while not compiled.done():
            wait((compiled,), SETTLE_S)
            self.settle()
        return compiled.result()

    def _submit(self, job: _Job) -> None:
        if self._worker is None:
            self._worker = _Worker()
        worker = self._worker
        worker.submit(lambda: self._complete(job, worker))

    def _complete(self, job: _Job, worker: _Worker) -> None:
        """Compile a job in the worker thread, unless it was abandoned."""
        if job.compiled.done():
            return
        job.begun = worker.clocks()
        with contextlib.suppress(InvalidStateError):
            try:
                job.compiled.set_result(self._compile(job.constraint))
            except InvalidParameter as error:
                job.compiled.set_exception(error)
            except BaseException as error:  # a bug or a panic must not end this thread
                job.compiled.set_exception(InvalidParameter(job.constraint.field, f"can't be compiled: {error}"))

    def _abandon(self, job: _Job) -> None:
        """Fail a late job, and move those queued behind it to a new thread."""
        assert self._worker is not None
        self._abandoned.append(self._worker)
        self._worker.end()
        self._worker = None
        why = f"takes longer than {self._timeout:g} s to compile"
        with contextlib.suppress(InvalidStateError):
            job.compiled.set_exception(InvalidParameter(job.constraint.field, why))
        for other in self._underway.values():
            if not other.compiled.done():
                self._submit(other)

    def _keep(self, key: bytes, compiled: Compiled) -> None:
        error = compiled.exception()
        if error is not None:
            self._failures[key] = str(error).partition(": ")[2]
            if len(self._failures) > FAILURES_MAX:
                self._failures.popitem(last=False)
            return
        self._kept[key] = compiled
        if len(self._kept) > self._kept_max:
            self._kept.popitem(last=False)  # rows that use it have their own matchers

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        """Compile, including two masks, which reveal costly grammars."""
        if self._tokenizer is None:
            self._tokenizer = grammar_tokenizer(*self._source)
        limits = LLParserLimits(
            initial_lexer_fuel=INITIAL_LEXER_FUEL, step_lexer_fuel=STEP_LEXER_FUEL, verbose_errors=False
        )
        matcher = LLMatcher(self._tokenizer, constraint.grammar, log_level=0, limits=limits)
        probe = matcher.deep_copy()
        legal = _legal(probe, self._tokenizer)
        if len(legal) and not probe.is_error():
            probe.try_consume_tokens(legal[:1].tolist())
            _legal(probe, self._tokenizer)
        for one in (matcher, probe):
            if one.is_error():
                raise InvalidParameter(constraint.field, _reason(one.get_error()))
        if not len(legal):
            raise InvalidParameter(constraint.field, "nothing matches it")
        return CompiledGrammar(matcher, constraint.field)


def _legal(matcher: LLMatcher, tokenizer: LLTokenizer) -> np.ndarray:
    """Return the tokens that may come next, except end tokens, int64 [n]."""
    if matcher.is_error() or matcher.is_stopped():
        return np.empty(0, np.int64) if matcher.is_error() else np.array(tokenizer.eos_tokens)
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    found = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    rest = found[~np.isin(found, tokenizer.eos_tokens)]
    return rest if len(rest) else found


def _reason(error: str) -> str:
    """Return the useful line of llguidance's error message."""
    if (found := re.search(r"^error: (.*)$", error, re.MULTILINE)) is not None:
        return f"is not a supported expression: {found[1]}"
    first = error.partition("\n")[0]
    first = re.sub(r"^(at )?\d+\(\d+\): ", "", first)
    return f"can't be followed: {first.removeprefix('failed to compile JSON schema: ')}"


def _failed(constraint: Constraint, why: str) -> Compiled:
    failed: Compiled = Future()
    failed.set_exception(InvalidParameter(constraint.field, why))
    return failed


class _Worker:
    """One low-priority thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._thread.is_alive()

    def clocks(self) -> _Clocks:
        assert self._thread.ident is not None
        return _Clocks(time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident)), time.monotonic())

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def end(self) -> None:
        """End after the current work."""
        self._queue.put(None)

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (work := self._queue.get()) is not None:
            work()
