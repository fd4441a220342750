"""The contract between scheduler and engine: one step shape, and the engine that executes it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from freehold.arrays import Bool, Int32, Int64
from freehold.sampling_params import SamplingParams

FROM_DEVICE = -1  # an input token that the engine takes from its own last sample of that row


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
    namespace: str = ""  # whose KV this is


@dataclass(frozen=True)
class Step:
    """`counts[i]` new tokens for the sequence in row `rows[i]`, which has `starts[i]` tokens before.

    Decode is a count of 1, a prefill chunk any count; there is no other difference.
    """

    number: int
    rows: Int64  # [sequences]
    starts: Int64  # [sequences] position of the first new token
    counts: Int64  # [sequences]
    tokens: Int32  # [sum of counts], FROM_DEVICE where the engine knows the token and we don't yet
    samples: Bool  # [sequences] whether to sample a token after the last new one
    row_starts: list[RowStart] = field(default_factory=list[RowStart])
    # For each cache group (rows, columns, pages): writes to the engine's page tables, in order.
    page_updates: list[tuple[Int32, Int32, Int32]] = field(default_factory=list[tuple[Int32, Int32, Int32]])


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one sampled position, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class StepResult:
    tokens: Int32  # [sequences] the sampled token, or -1 where none was asked for
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])


class Engine(Protocol):
    """Executes steps in the order submitted. Holds no allocator: it uses the pages it is told."""

    def execute(self, step: Step) -> Future[StepResult]:
        """Queue a step. Its writes happen before those of any later step."""
        ...

    def shutdown(self) -> None: ...
