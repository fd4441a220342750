"""Measures windows and states: decoding after a long context, and the second turn of a conversation."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.table import Table

from freehold.bench.fetched_models import GEMMA3_270M
from freehold.bench.random_mamba import RandomMamba
from freehold.config import KV_CACHE_DTYPES
from freehold.contract.sampling_params import SamplingParams
from freehold.llm import LLM
from freehold.scheduler.request import Request

SHORT, LONG = 4_096, 32_000
OUTPUT, ROUNDS = 24, 5
HISTORY, TURN = 2_000, 32
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)


def run_hybrid() -> int:
    """Print ratios. Return exit code 0 if the goals are met."""
    console = Console()
    decoding: dict[str, tuple[float, float]] = {}
    for kind in KV_CACHE_DTYPES:
        with console.status(f"Measuring with KV in {kind}: a prompt of 32,000 tokens takes some minutes ..."):
            decoding[kind] = _decode_seconds(kind)
    with console.status("Measuring turns ..."):
        second, cold = _turn_seconds()
    table = Table("what", "measured", "goal", title="Windows and states")
    for kind, (short, long) in decoding.items():
        table.add_row(f"Gemma 3 270M, KV in {kind}, a token behind {SHORT:,} tokens", f"{1000 * short:.1f} ms", "")
        table.add_row(f"the same behind {LONG:,} tokens", f"{1000 * long:.1f} ms", "")
        table.add_row("ratio", f"{long / short:.2f} x", "<= 1.1 x")
    table.add_row(
        f"Mamba2 of 130M, first token of a turn of {TURN} on {HISTORY:,} tokens", f"{1000 * second:.0f} ms", ""
    )
    table.add_row("the same, cold", f"{1000 * cold:.0f} ms", "")
    table.add_row("ratio", f"{cold / second:.1f} x", ">= 5 x")
    console.print(table)
    return 0 if all(long <= 1.1 * short for short, long in decoding.values()) and cold >= 5 * second else 1


def _decode_seconds(kind: str) -> tuple[float, float]:
    """Return seconds per token after a short and a long context with KV stored as `kind`, medians of alternating
    rounds."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1000, 100_000, count).tolist() for count in (SHORT, LONG)]
    options = {"max_running_requests": 2, "chunked_prefill_size": 2048, "kv_cache_dtype": kind}
    with LLM(str(GEMMA3_270M.path()), **options) as llm:
        llm.generate(prompts, replace(GREEDY, max_tokens=1))
        series: tuple[list[float], list[float]] = ([], [])
        for _ in range(ROUNDS):
            for prompt, seconds in zip(prompts, series, strict=True):
                seconds.append(_seconds_a_token(llm, prompt))
        return statistics.median(series[0]), statistics.median(series[1])


def _seconds_a_token(llm: LLM, prompt: list[int]) -> float:
    """Return seconds per token after the first, whose step also computes the prompt."""
    (request,) = llm.requests([prompt], GREEDY)
    llm.scheduler.add(request)
    while request.first_token is None:
        llm.scheduler.step()
    started, before = time.perf_counter(), len(request.output)
    while llm.scheduler.has_work:
        llm.scheduler.step()
    return (time.perf_counter() - started) / (len(request.output) - before)


def _turn_seconds() -> tuple[float, float]:
    """Return seconds until the first token of a second turn, and of the same number of tokens without a history."""
    rng, one = np.random.default_rng(1), replace(GREEDY, max_tokens=1)
    turns: list[float] = []
    cold: list[float] = []
    with LLM(checkpoint=RandomMamba(), max_running_requests=2) as llm:
        for number in range(ROUNDS + 1):
            history = rng.integers(1000, 40_000, HISTORY).tolist()
            first = Request(f"first-{number}", np.array(history, np.int32), one, session=f"s{number}")
            _run(llm, first)
            new = rng.integers(1000, 40_000, TURN).tolist()
            whole = [*history, *first.output.tolist(), *new]
            other = rng.integers(1000, 40_000, len(whole)).tolist()
            measured = (
                _run(llm, Request(f"second-{number}", np.array(whole, np.int32), one, session=f"s{number}")),
                _run(llm, Request(f"cold-{number}", np.array(other, np.int32), one)),
            )
            if number:  # the first round warms up
                for series, seconds in zip((turns, cold), measured, strict=True):
                    series.append(seconds)
    return statistics.median(turns), statistics.median(cold)


def _run(llm: LLM, request: Request) -> float:
    started = time.perf_counter()
    llm.scheduler.add(request)
    while llm.scheduler.has_work:
        llm.scheduler.step()
    return time.perf_counter() - started
