"""The cost of the always-on ledger: decoding with and without it, interleaved in one run."""

from __future__ import annotations

import statistics
import time
from typing import Any

from rich.console import Console

from freehold.contract.arrays import Int32, Int64
from freehold.contract.sampling_params import SamplingParams
from freehold.llm import LLM

ROUNDS = 24
STREAMS = 16
OUTPUT_TOKENS = 32
LIMIT = 0.03


def run_ledger_cost() -> int:
    """Print the cost. Return exit code 0 if it is below the limit."""
    options = {"max_running_requests": STREAMS, "page_size": 4, "disable_radix_cache": True}
    with (
        Console().status("Measuring, about two minutes ..."),
        LLM(**options) as checked,
        LLM(**options) as unchecked,
    ):
        for pool in unchecked.scheduler.memory.pools:
            pool.move = lambda pages, source, target: None  # owners are not tracked
        spent = _time_moves(checked)
        times = [(_seconds(checked, i), _seconds(unchecked, i)) for i in range(ROUNDS)][2:]
        share = spent[0] / sum(on for on, _ in times)
    on, off = (statistics.median(column) for column in zip(*times, strict=True))
    cost = on / off - 1
    Console().print(
        f"ledger, checks and flight recorder, {STREAMS} streams, page size 4: {100 * cost:+.2f} % of decode time "
        f"(medians of {len(times)} rounds on and off); inside the ledger {100 * share:.2f} % of the time; "
        f"goal below {100 * LIMIT:.0f} %",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if cost < LIMIT and share < LIMIT else 1


def _time_moves(llm: LLM) -> list[float]:
    """Return a list of one: the seconds spent in moves from now on."""
    spent = [0.0]
    for pool in llm.scheduler.memory.pools:
        move = pool.move

        def timed(pages: Int32, source: int | Int64, target: int | Int64, move: Any = move) -> None:
            started = time.perf_counter()
            move(pages, source, target)
            spent[0] += time.perf_counter() - started

        pool.move = timed
    return spent


def _seconds(llm: LLM, number: int) -> float:
    prompts = [[100 + number, 200 + i, 300] for i in range(STREAMS)]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    requests = llm.requests(prompts, params)
    for request in requests:
        llm.scheduler.add(request)
    started = time.perf_counter()
    while llm.scheduler.has_work:
        llm.scheduler.step()
    return time.perf_counter() - started
