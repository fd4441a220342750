"""Legal next tokens of rows with a grammar."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher

from freehold.contract.arrays import Bool, Int32, Int64
from freehold.contract.step import RowStart
from freehold.engine.grammar.compiler import CompiledGrammar
from freehold.engine.sequences import Work

UInt32 = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]


@dataclass
class _Row:
    """A sequence under a grammar. `output` is its earlier output, until consumed. If it `ignores_eos`, tokens that end
    the text are legal only if nothing else is. After such a token it is `closed`: only those are legal. `failure` says
    why it can't continue."""

    grammar: CompiledGrammar
    output: list[int] | None
    ignores_eos: bool
    matcher: LLMatcher | None = None
    closed: bool = False
    failure: str | None = None

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Record any exception of its matcher, panics included, as a failure of only this row."""
        try:
            yield
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Masks:
    """`words` uint32 [positions, ceil(vocab / 32)] of sequences with a grammar: bit t says whether token t is legal.
    `first[i]`: the first row of sequence i, -1 if anything is legal. `refused` by sequence."""

    words: UInt32
    first: Int64
    refused: dict[int, str] = field(default_factory=dict[int, str])

    def of(self, sequence: int, offset: int) -> UInt32 | None:
        """Return the mask at the sequence's position `offset`, uint32 [words]; None if anything is legal."""
        first = int(self.first[sequence])
        return None if first < 0 else self.words[first + offset]


class Matchers:
    """One matcher per row with a grammar. The engine owns them because only it knows the last samples. A helper thread
    computes masks during the forward pass, and consumes earlier output of restarted rows."""

    def __init__(self, row_count: int, vocab_size: int, eos_tokens: tuple[int, ...]):
        self._rows: list[_Row | None] = [None] * row_count
        self._words = -(-vocab_size // 32)
        self._eos = frozenset(eos_tokens)
        self._only_eos: UInt32 = np.zeros(self._words, np.uint32)
        for token in eos_tokens:
            self._only_eos[token // 32] |= np.uint32(1 << token % 32)
        self._count = 0
        self._helper: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def start(self, start: RowStart) -> None:
        """Assign a row to a new sequence."""
        self._count -= self._rows[start.row] is not None
        grammar = start.grammar
        self._rows[start.row] = None
        if isinstance(grammar, CompiledGrammar):
            self._rows[start.row] = _Row(grammar, start.tokens[start.prompt_length :].tolist(), start.params.ignore_eos)
            self._count += 1

    def forced(self, rows: Int64, limits: Int64) -> tuple[Int32, Int64]:
        """Return tokens forced by grammars, at most `limits` [n] for each of `rows` [n] -> (tokens int32 [n, k], counts
        [n]). They are drafts, since the same text has several tokenizations."""
        found = np.zeros((len(rows), int(limits.max(initial=0))), np.int32)
        counts = np.zeros(len(rows), np.int64)
        for i in np.flatnonzero(limits).tolist() if self._count else ():
            if (row := self._going_on(int(rows[i]))) is not None and row.matcher is not None:
                with row.asking():
                    tokens = row.matcher.compute_ff_tokens()[: int(limits[i])]
                    found[i, : len(tokens)], counts[i] = tokens, len(tokens)
        return found, counts

    def cut(self, rows: Int64, drafts: Int32, counts: Int64) -> Int64:
        """Return how many leading `drafts` int32 [n, k], of `counts` [n] for `rows` [n], are legal."""
        legal = counts.copy()
        for i in np.flatnonzero(counts).tolist() if self._count else ():
            if (row := self._going_on(int(rows[i]))) is not None and row.matcher is not None:
                with row.asking():
                    legal[i] = row.matcher.validate_tokens(drafts[i, : counts[i]].tolist())
        return legal

    def _going_on(self, number: int) -> _Row | None:
        """Return a row if its matcher is up to date with its last token."""
        row = self._rows[number]
        if row is None or row.output is not None or row.closed or row.failure is not None:
            return None
        return row

    def begin(self, work: Work) -> Future[Masks] | None:
        """Start computing masks for the sequences of `work` that sample, at their next position and after each draft.
        None if none of them has a grammar."""
        if not self._count:
            return None
        chosen = work.chosen
        rows, drafts, proposed = work.rows[chosen], work.drafts[chosen], work.proposed[chosen]
        bound: Bool = np.array([self._rows[row] is not None for row in rows.tolist()], np.bool_)
        if not bound.any():
            return None
        sizes = np.where(bound, proposed + 1, 0)
        first = np.where(bound, np.cumsum(sizes) - sizes, -1)
        masks = Masks(np.zeros((int(sizes.sum()), self._words), np.uint32), first)
        chains = [drafts[i, : proposed[i]].tolist() for i in range(len(rows))]
        if self._helper is None:
            self._helper, self._executor = ThreadPoolExecutor(1, "masks"), LLExecutor(1)
        return self._helper.submit(self._compute, rows, chains, masks)

    def _compute(self, rows: Int64, chains: list[list[int]], masks: Masks) -> Masks:
        for i in np.flatnonzero(masks.first >= 0).tolist():
            row, first = self._rows[int(rows[i])], int(masks.first[i])
            assert row is not None
            with row.asking():
                self._fill(row, masks.words[first : first + len(chains[i]) + 1], chains[i])
            if row.failure is not None:
                masks.refused[i] = row.failure
        return masks

    def _fill(self, row: _Row, words: UInt32, chain: list[int]) -> None:
        """Compute one row's masks. After an illegal draft, or one that ends the text, nothing is legal."""
        matcher = None if row.failure is not None else self._started(row)
        if matcher is None:
            return
        if row.closed:
            words[:] = self._only_eos
            return
        end = next((at for at, token in enumerate(chain) if token in self._eos), len(chain))
        place, size = words.ctypes.data, 4 * self._words
        if end:
            assert self._executor is not None
            self._executor.unsafe_compute_mask_ptr_with_draft_token([(matcher, 0, chain[:end])], place, size, end + 1)
        else:
            matcher.unsafe_compute_mask_ptr(place, size)
        if matcher.is_error():
            row.failure = _why(matcher)
        elif not words[0].any():
            row.failure = "nothing can follow"
        elif row.ignores_eos:
            others = words & ~self._only_eos
            has_others = others.any(axis=1)
            words[has_others] = others[has_others]

    def _started(self, row: _Row) -> LLMatcher | None:
        """Return its matcher, after consuming earlier output; None if it has failed."""
        if row.matcher is None:
            row.matcher = row.grammar.matcher()
        if row.output is not None:
            output, row.output = row.output, None
            self._consume(row, output)
        return row.matcher if row.failure is None else None

    def _consume(self, row: _Row, tokens: list[int]) -> None:
        """Consume tokens up to the first that ends the text, which is never consumed."""
        assert row.matcher is not None
        end = next((at for at, token in enumerate(tokens) if token in self._eos), len(tokens))
        row.closed |= end < len(tokens)
        with row.asking():
            if end and row.matcher.try_consume_tokens(tokens[:end]) < end:
                row.failure = _why(row.matcher)

    def advance(self, rows: Int64, counts: Int64, tokens: Int32) -> None:
        """Consume sampled tokens: `counts` [n] for each of `rows` [n], flat in `tokens`."""
        if not self._count:
            return
        ends = np.cumsum(counts)
        for i, number in enumerate(rows.tolist()):
            row = self._rows[number]
            if row is not None and not row.closed and row.failure is None and counts[i]:
                self._consume(row, tokens[ends[i] - counts[i] : ends[i]].tolist())


def _why(matcher: LLMatcher) -> str:
    return matcher.get_error().partition("\n")[0] or "a token is not legal"
