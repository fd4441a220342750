"""What the always-on ledger costs: decoding with and without it, interleaved in one run."""

from __future__ import annotations

import statistics
import time

from rich.console import Console

from freehold.llm import LLM
from freehold.sampling_params import SamplingParams

ROUNDS = 9
STREAMS = 16
OUTPUT_TOKENS = 96
LIMIT = 0.03


def run_ledger_cost() -> int:
    """Print the cost -> exit code 0 if it is below the limit."""
    with (
        Console().status("Measuring, about two minutes ..."),
        LLM(max_running_requests=STREAMS, page_size=4) as checked,
        LLM(max_running_requests=STREAMS, page_size=4) as unchecked,
    ):
        for pool in unchecked.scheduler.memory.pools:
            pool.move = lambda pages, source, target: None  # owners are not kept at all
        ratios = [_seconds(checked, i) / _seconds(unchecked, i) for i in range(ROUNDS)][1:]
    cost = statistics.median(ratios) - 1
    Console().print(
        f"ledger, checks and flight recorder: {100 * cost:+.2f} % of decode time, {STREAMS} streams, page size 4 "
        f"(single rounds {', '.join(f'{100 * (ratio - 1):+.1f}' for ratio in ratios)}; goal below {100 * LIMIT:.0f} %)",
        highlight=False,
        soft_wrap=True,
    )
    return 0 if cost < LIMIT else 1


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
