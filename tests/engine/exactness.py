"""What exactness means here, and how it is checked.

transformers would generate the same greedy tokens if, and only if, at every position of prompt + output
its best token is the one that was generated. That takes one forward pass a prompt instead of 64. Where
its two best logits are nearer than float error, either token is right, and we compare log-probabilities:
the generated token's must be within TOLERANCE of the best.

Against itself Freehold is held to more: the tokens of every configuration must be those of the plainest
one, always, because its kernels compute a row the same way whatever is around it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from unittest import mock

import numpy as np
import torch

from freehold import LLM, SamplingParams
from freehold.scheduler.speculation import DraftBudget

TOLERANCE = 1e-3  # of a log-probability; float32 sums in another order differ by about 1e-5
NEW_TOKENS = 64


def greedy(max_tokens: int = NEW_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def make_prompts(llm: LLM, text: str, lengths: list[int]) -> list[list[int]]:
    """Pieces of a text at random places; half of them share the beginning, to have prefixes to share."""
    tokens = llm.tokenizer.encode(text).tolist()
    rng = np.random.default_rng(7)
    starts = [0 if i % 2 else int(rng.integers(0, len(tokens) - length)) for i, length in enumerate(lengths)]
    prompts = [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return [[*prompt[:-1], 100 + i] for i, prompt in enumerate(prompts)]


def assert_transformers_agrees(model, prompt: list[int], output: list[int]) -> None:
    with torch.inference_mode():
        tokens = torch.tensor([prompt + output])
        logits = model(tokens, logits_to_keep=len(output) + 1, use_cache=False).logits[0, :-1]
    best = logits.argmax(dim=-1)
    given = torch.tensor(output)
    differ = torch.nonzero(best != given).flatten().tolist()
    logprobs = logits.log_softmax(dim=-1)
    for i in differ:
        gap = float(logprobs[i, best[i]] - logprobs[i, given[i]])
        assert gap < TOLERANCE, f"token {i} of a prompt of {len(prompt)}: {output[i]} is {gap} below {int(best[i])}"


def always_drafting():
    """A context in which every row drafts four tokens a step. How many pay depends on the machine's mood."""
    return mock.patch.object(DraftBudget, "choose", lambda budget, rows, step_tokens: np.full(len(rows), 4))


class Mode(StrEnum):
    """What surrounds a request."""

    COLD_ALONE = "cold, one at a time"
    COLD_BATCH = "cold, all at once"
    WARM_ALONE = "computed before, one at a time"
    WARM_BATCH = "computed before, all at once"
    SQUEEZED = "all at once, on so little memory that each is retracted"


class Precision(StrEnum):
    """What products are made of, and what KV is kept as."""

    EXACT = "float32/float32"
    DEFAULT = "int16/bfloat16"
    SMALLEST = "int8/int8"

    @property
    def options(self) -> dict[str, str]:
        compute, kv = self.split("/")
        return {"linear_compute": compute, "kv_cache_dtype": kv}


@dataclass(frozen=True)
class Cell:
    """One configuration of the matrix."""

    page_size: int
    chunk: int
    overlap: bool
    mode: Mode
    speculation: str | None = None
    precision: Precision = Precision.EXACT

    def __str__(self) -> str:
        schedule = "overlap" if self.overlap else "synchronous"
        kind = f"{self.speculation or 'plain'}, {self.precision}"
        return f"page {self.page_size}, chunk {self.chunk}, {schedule}, {kind}, {self.mode}"

    def run(self, checkpoint, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        warm = self.mode in (Mode.WARM_ALONE, Mode.WARM_BATCH)
        alone = self.mode in (Mode.COLD_ALONE, Mode.WARM_ALONE)
        squeezed = self.mode is Mode.SQUEEZED
        longest = max(map(len, prompts)) + (params.max_tokens or 0)
        pages = -(-(longest + 2 * self.page_size) // self.page_size) if squeezed else None
        llm = LLM(
            checkpoint=checkpoint,
            page_size=self.page_size,
            chunked_prefill_size=self.chunk,
            disable_overlap_schedule=not self.overlap,
            max_running_requests=16,
            num_pages=pages,
            forward_retract_interval=2 if squeezed else 0,
            audit_interval=1,
            speculative_algorithm=self.speculation,
            speculative_num_draft_tokens=4,
            speculative_draft_layers=DRAFT_LAYERS if self.speculation == "draft" else None,
            **self.precision.options,
        )
        with llm, always_drafting():
            if warm:
                llm.generate(prompts, greedy(1))
            if alone:
                outputs = [llm.generate([prompt], params)[0] for prompt in prompts]
            else:
                outputs = llm.generate(prompts, params)
            if warm:
                size = self.page_size
                assert all(out.cached_tokens == (out.prompt_tokens - 1) // size * size for out in outputs)
            if squeezed:
                assert all(out.retractions for out in outputs)
            if self.speculation:
                assert llm.scheduler.results.drafted_count, "nothing was drafted"
            counts = llm.page_counts
            assert counts.lease == counts.pinned == counts.limbo == 0
        return [out.token_ids for out in outputs]


AXES = ((1, 4, 16, 64), (16, 100, 512), (True, False), tuple(Mode), (None, "ngram", "draft"), tuple(Precision))
DRAFT_LAYERS = 2


def all_cells() -> list[Cell]:
    return [Cell(*values) for values in itertools.product(*AXES)]


def full_matrix() -> list[Cell]:
    """Every cell in float32, but speculation with one chunk size only; of the others what covers all pairs."""
    exact = [cell for cell in all_cells() if cell.precision is Precision.EXACT]
    exact = [cell for cell in exact if cell.speculation is None or cell.chunk == 100]
    return exact + [cell for cell in pairwise_cover() if cell.precision is not Precision.EXACT]


def pairwise_cover() -> list[Cell]:
    """Few cells in which every two values of different axes meet: greedily, most new pairs first."""

    def pairs(cell: Cell) -> set[tuple[int, int, object, object]]:
        values = tuple(vars(cell).values())
        return {(i, j, values[i], values[j]) for i in range(len(values)) for j in range(i)}

    matrix = all_cells()
    missing = set().union(*(pairs(cell) for cell in matrix))
    cover: list[Cell] = []
    while missing:
        best = max(matrix, key=lambda cell: len(pairs(cell) & missing))
        cover.append(best)
        missing -= pairs(best)
    return cover
