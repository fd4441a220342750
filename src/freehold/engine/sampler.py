"""Samples tokens from logits, with each row's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from freehold.contract.arrays import Float32, Int32, Int64
from freehold.contract.sampling_params import SamplingParams
from freehold.contract.step import RowStart, TokenLogprobs
from freehold.engine.device import Drawing
from freehold.engine.grammar.matchers import Masks, UInt32


@dataclass
class _Row:
    """Data of a row that needs more than plain greedy choice."""

    params: SamplingParams
    seed: np.uint64
    prompt_length: int
    stop_tokens: Int64
    bias_tokens: Int64
    bias: Float32
    in_prompt: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))
    counts: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))  # of the output, by token


class Sampler:
    """Keeps each row's parameters and output counts, so that sampled tokens need not leave the engine."""

    def __init__(self, row_count: int, vocab_size: int, drawing: Drawing):
        self._drawing = drawing
        self._vocab_size = vocab_size
        self._rows: list[_Row | None] = [None] * row_count

    def start(self, start: RowStart) -> None:
        """Assign a row to a new sequence."""
        params = start.params
        plain = params.temperature == 0 and not params.penalizes and not params.logit_bias
        if plain and params.logprobs is None and not params.min_tokens:
            self._rows[start.row] = None
            return
        known = [token for token in params.logit_bias if token < self._vocab_size]
        row = _Row(
            params=params,
            seed=np.uint64(start.seed & (1 << 64) - 1),
            prompt_length=start.prompt_length,
            stop_tokens=np.array([t for t in start.stop_tokens if 0 <= t < self._vocab_size], np.int64),
            bias_tokens=np.array(known, np.int64),
            bias=np.array([params.logit_bias[token] for token in known], np.float32),
        )
        if params.penalizes:
            row.in_prompt = np.zeros(self._vocab_size, np.bool_)
            row.in_prompt[start.tokens[: start.prompt_length]] = True
            row.counts = np.bincount(start.tokens[start.prompt_length :], minlength=self._vocab_size).astype(np.int32)
        self._rows[start.row] = row

    def sample(
        self, rows: Int64, positions: Int64, logits: Float32, drafts: Int32, proposed: Int64,
        masks: Masks | None = None,
    ) -> tuple[Int32, Int64, dict[int, TokenLogprobs]]:  # fmt: skip
        """Sample a token at `positions` [n] of `rows` [n], and one more after each of the first `proposed` [n] `drafts`
        [n, k] that equals its sample. `logits` float32 [sum of proposed + 1, vocab] (changed in place) are consecutive
        for each row. `masks` give the legal tokens; rows that they refuse are not sampled.

        Return tokens int32 flat, counts int64 [n], and log-probabilities by token index where requested.

        A draft guesses the sampler's choice and is kept if it matches. For a deterministic proposal that is rejection
        sampling (Leviathan et al. 2023: accept with probability p(draft)), and because the random number belongs to the
        position, the tokens equal those of plain decoding.
        """
        if masks is None and not drafts.shape[1] and all(self._rows[row] is None for row in rows.tolist()):
            return logits.argmax(axis=1).astype(np.int32), np.ones(len(rows), np.int64), {}
        tokens: list[int] = []
        counts = np.zeros(len(rows), np.int64)
        logprobs: dict[int, TokenLogprobs] = {}
        first = 0
        for i, (number, position, ahead) in enumerate(
            zip(rows.tolist(), positions.tolist(), proposed.tolist(), strict=True)
        ):
            row = self._rows[number]
            is_refused = masks is not None and i in masks.refused
            for j in range(0 if is_refused else ahead + 1):
                legal = None if masks is None else masks.of(i, j)
                if j and legal is not None and not legal.any():
                    break  # the next step finds out why
                token, scored = self._next(row, position + j, logits[first + j], legal)
                if row is not None and row.params.logprobs is not None:
                    logprobs[len(tokens)] = token_logprobs(row.params, token, scored)
                tokens.append(token)
                counts[i] += 1
                if j < ahead and token != drafts[i, j]:
                    break
            first += ahead + 1
        return np.array(tokens, np.int32), counts, logprobs

    def guess(self, number: int, position: int, logits: Float32) -> int:
        """Return what row `number` would choose given these logits (changed in place)."""
        row = self._rows[number]
        if row is None:
            return int(logits.argmax())
        self._adjust(row, logits)
        self._ban_stops(row, position, logits)
        return self._choose(row, position, logits)

    def _next(
        self, row: _Row | None, position: int, logits: Float32, legal: UInt32 | None
    ) -> tuple[int, Float32]:  # fmt: skip
        """Return the token, and the unmasked logits for its log-probability."""
        scored = logits
        if row is not None:
            self._adjust(row, logits)
            if row.params.logprobs is not None and legal is not None:
                scored = logits.copy()
        if legal is not None:
            self._drawing.mask(logits, legal)
        if row is None:
            return int(logits.argmax()), scored
        self._ban_stops(row, position, logits)
        token = self._choose(row, position, logits)
        if len(row.counts):
            row.counts[token] += 1
        return token, scored

    def _adjust(self, row: _Row, logits: Float32) -> None:
        params = row.params
        if len(row.counts):
            self._drawing.penalize(
                logits, row.in_prompt, row.counts, np.float32(params.repetition_penalty),
                np.float32(params.presence_penalty), np.float32(params.frequency_penalty),
            )  # fmt: skip
        if len(row.bias):
            logits[row.bias_tokens] += row.bias

    def _ban_stops(self, row: _Row, position: int, logits: Float32) -> None:
        """Ban stop tokens before min_tokens, unless a grammar allows nothing else."""
        if position - row.prompt_length >= row.params.min_tokens:
            return
        before = logits[row.stop_tokens]
        logits[row.stop_tokens] = -np.inf
        if logits.max() == -np.inf:
            logits[row.stop_tokens] = before

    def _choose(self, row: _Row, position: int, logits: Float32) -> int:
        params = row.params
        if params.temperature == 0:
            return int(logits.argmax())
        chance = self._drawing.uniform(row.seed, position)
        return self._drawing.draw(
            logits, np.float32(params.temperature), params.top_k, params.top_p, np.float32(params.min_p), chance
        )

    def score(self, number: int, logits: Float32, following: Int32) -> list[TokenLogprobs]:
        """Score prompt tokens: `following` int32 [n] come after the positions of `logits` float32 [n, vocab] in row
        `number`."""
        row = self._rows[number]
        assert row is not None, "a row with log-probabilities"
        return [token_logprobs(row.params, int(token), one) for token, one in zip(following, logits, strict=True)]


def token_logprobs(params: SamplingParams, token: int, logits: Float32) -> TokenLogprobs:
    """Return the log-softmax of logits [vocab], divided by the temperature unless greedy."""
    scaled = logits if params.temperature == 0 else logits / np.float32(params.temperature)
    highest = scaled.max()
    total = float(highest) + float(np.log(np.exp(scaled - highest, dtype=np.float32).sum(dtype=np.float64)))
    count = min(params.logprobs or 0, len(scaled))
    best = np.argpartition(-scaled, count - 1)[:count] if count else np.empty(0, np.int64)
    best = best[np.lexsort((best, -scaled[best]))]

    def entries(ids: Iterable[int]) -> list[tuple[int, float]]:
        return [(int(one), float(scaled[one]) - total) for one in ids]

    return TokenLogprobs(token, float(scaled[token]) - total, entries(best), entries(params.logprob_token_ids))
