"""The contract between scheduler and engine: one step shape, and the engine that executes it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from freehold.contract.adapter import Adapter
from freehold.contract.arrays import Bool, Float64, Int32, Int64, ragged
from freehold.contract.sampling_params import SamplingParams

NOT_SCORED = 1 << 62


@dataclass(frozen=True)
class RowStart:
    """A sequence takes a row: all that the engine must know to sample for it until the row's next
    start. `prompt_length` tokens of `tokens` int32 [n] are prompt, the rest earlier output."""

    row: int
    params: SamplingParams
    seed: int
    tokens: Int32
    prompt_length: int
    stop_tokens: tuple[int, ...]  # not to be sampled before min_tokens are out
    max_length: int  # no token is sampled past this many, no KV written for the last
    cached: int = 0  # the first tokens, whose KV is there already
    namespace: str = ""  # whose KV this is
    scored_from: int = NOT_SCORED  # from this position on, report what the model made of the next prompt token
    pooled_from: int = NOT_SCORED  # from this position on, add up the final hidden states of prompt tokens
    grammar: object | None = None  # what its output must follow, as the engine has compiled it
    adapter: Adapter | None = None  # what computes beside the model


class Planned(NamedTuple):
    """What a `Step` says of its sequences, for compiled code."""

    rows: Int64
    starts: Int64
    counts: Int64
    samples: Bool
    drafts: Int64
    decodes: Bool


@dataclass(frozen=True)
class Step:
    """`counts[i]` new tokens for the sequence in row `rows[i]`, then at most `drafts[i]` proposed ones.

    Tokens are not in it: the engine has them, from the row's start or from its own samples, which may not even be
    known to the scheduler yet. Decode is a count of 1, a prefill chunk any count, verification a count of 1 with
    drafts. Drafts are the engine's: it proposes, verifies and reports how many tokens came of it.
    While the outcome of an earlier verification is unknown, `starts` is the highest that it can be, and
    the engine takes the sequence up where it really is, and never past the row's `max_length`.
    """

    number: int
    rows: Int64  # [sequences]
    starts: Int64  # [sequences] position of the first new token
    counts: Int64  # [sequences]
    decodes: Bool  # [sequences] it goes on from its own last sample; others are chunks of what the row started with
    samples: Bool  # [sequences] whether to sample a token after the last new one
    drafts: Int64  # [sequences] 0 unless it samples
    row_starts: list[RowStart] = field(default_factory=list[RowStart])
    # For each cache group (rows, columns, pages): writes to the engine's page tables, in order.
    page_updates: list[tuple[Int32, Int32, Int32]] = field(default_factory=list[tuple[Int32, Int32, Int32]])

    @property
    def planned(self) -> Planned:
        return Planned(self.rows, self.starts, self.counts, self.samples, self.drafts, self.decodes)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position: of its token, of the best ones in order, of those asked for."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    asked: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])


@dataclass(frozen=True)
class StepResult:
    """What a step gave. `tokens` has those of the first sequence, then those of the second, ..."""

    tokens: Int32  # [sum of counts]
    counts: Int64  # [sequences] tokens sampled: 0 where none was asked for, at most drafts + 1
    written: Int64  # [sequences] tokens of the sequence that have their KV, in every cache group
    proposed: Int64  # [sequences] drafts verified: as many as the engine could think of
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])  # by index of tokens
    # Of prompt tokens, by index of the sequence: those that follow the tokens it computed, from `scored_from` on.
    scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict[int, list[TokenLogprobs]])
    # Of prompt tokens, by index of the sequence: how many it computed, from `pooled_from` on, and their sum.
    pooled: dict[int, tuple[int, Float64]] = field(default_factory=dict[int, tuple[int, Float64]])
    seconds: float = 0.0  # that it took; 0 if nobody measured
    # Sequences, by index, for which nothing was sampled because their grammar can't be followed any further, and why.
    refused: dict[int, str] = field(default_factory=dict[int, str])

    def only(self, live: Int64) -> StepResult:
        """Return the part of the sequences with indices `live` [n], none of which was refused."""
        counts = self.counts[live]
        sequence, offset = ragged(counts)
        flat = (self.counts.cumsum() - self.counts)[live][sequence] + offset
        logprobs = {i: self.logprobs[at] for i, at in enumerate(flat.tolist()) if at in self.logprobs}
        scores = {i: self.scores[at] for i, at in enumerate(live.tolist()) if at in self.scores}
        pooled = {i: self.pooled[at] for i, at in enumerate(live.tolist()) if at in self.pooled}
        written, proposed = self.written[live], self.proposed[live]
        return StepResult(self.tokens[flat], counts, written, proposed, logprobs, scores, pooled, self.seconds)


@dataclass(frozen=True)
class KVShape:
    """The memory that an engine is given: pages of each cache group, a draft model's last, and rows of page tables."""

    page_counts: tuple[int, ...]
    page_size: int
    row_count: int
    token_limit: int
    kind: str = "float32"  # what a number of KV is kept as: one of KV_CACHE_DTYPES
    draft_limit: int = 0  # how many drafts of a row may be verified in a step


@dataclass(frozen=True)
class DraftCost:
    """What speculation costs on an engine. `limit` drafts a row at most. A step takes as long as
    `overhead_tokens` more tokens than it computes would suggest, so a few more cost little. Proposing a
    token takes `proposal` of a plain step; nothing for the `forced` ones at most that the grammar of a row names."""

    limit: int
    overhead_tokens: float = 4.0
    proposal: float = 0.0
    forced: int = 0


@dataclass(frozen=True)
class StepTiming:
    """What a step with so many decoding rows and prompt tokens lasted."""

    decoding: int
    prompt_tokens: int
    seconds: float


class Engine(Protocol):
    """Executes steps in the order submitted. Holds no allocator: it uses the pages it is told."""

    def execute(self, step: Step) -> Future[StepResult]:
        """Queue a step. Its writes happen before those of any later step."""
        ...

    def load_weights(self, source: str) -> Future[bytes]:
        """Replace the model's weights after the steps queued so far -> a fingerprint of their content. On failure the
        old ones stay."""
        ...

    def shutdown(self) -> None: ...
