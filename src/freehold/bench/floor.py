"""`make bench`: Freehold's minimum performance, side by side in one run."""

from __future__ import annotations

import multiprocessing
import os
import platform
import statistics
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from freehold.bench.prefix_tree import prefix_match_us, three_groups
from freehold.bench.scheduler import decode_step_us
from freehold.contract.sampling_params import SamplingParams
from freehold.engine.cpu.isa import choose
from freehold.llm import LLM

PROMPT_TOKENS = 32
OUTPUT_TOKENS = 128
ROUNDS = 3


@dataclass(frozen=True)
class Floor:
    """One line of the report."""

    what: str
    measured: str
    goal: str
    met: bool


def run_floor() -> int:
    """Print all floors. Return exit code 0 if all are met."""
    console = Console()
    with console.status("Measuring, about two minutes ..."):
        floors = [*_scheduler_floors(), *_model_floors()]
    cpu = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {choose()}"
    table = Table("what", "measured", "goal", "met", title=f"Freehold on {cpu}")
    for floor in floors:
        table.add_row(floor.what, floor.measured, floor.goal, "yes" if floor.met else "NO")
    console.print(table)
    return 0 if all(floor.met for floor in floors) else 1


def _scheduler_floors() -> list[Floor]:
    costs = {batch: decode_step_us(batch) for batch in (64, 256, 1024)}
    growth = costs[1024] / costs[256]
    match, hybrid = prefix_match_us(32_000), prefix_match_us(32_000, groups=three_groups(32_000, 16))
    return [
        Floor("scheduler + memory, a decode step of 256", f"{costs[256]:.0f} us", "< 300 us", costs[256] < 300),
        Floor("the same of 1024, over 256", f"{growth:.2f} x", "<= 4 x (linear)", growth <= 4),
        Floor("match + lease of a cached 32,000-token prompt", f"{match:.0f} us", "< 300 us", match < 300),
        Floor("the same with full attention, a window and states", f"{hybrid:.0f} us", "<= 60 us", hybrid <= 60),
    ]


def _model_floors() -> list[Floor]:
    """Measure interleaved, A B A B. Return floors of the medians."""
    with LLM(max_running_requests=16) as llm:
        reference = _Transformers(llm)
        ours: list[float] = []
        theirs: list[float] = []
        together: list[float] = []
        for number in range(ROUNDS + 1):
            results = (_speed(llm, 1, number), _speed(llm, 16, number), reference.speed(number))
            if number:  # the first round warms up
                for series, result in zip((ours, together, theirs), results, strict=True):
                    series.append(result)
        reference.close()
    one, other, sixteen = (statistics.median(series) for series in (ours, theirs, together))
    return [
        Floor("one stream, Freehold (Q4_1)", f"{one:.1f} tokens/s", "", True),
        Floor("one stream, transformers generate (float32)", f"{other:.1f} tokens/s", "", True),
        Floor("one stream, ratio", f"{one / other:.2f} x", ">= 2 x", one >= 2 * other),
        Floor("16 streams", f"{sixteen:.1f} tokens/s", "", True),
        Floor("16 streams over one", f"{sixteen / one:.2f} x", ">= 4 x", sixteen >= 4 * one),
    ]


def _prompt(llm: LLM, number: int) -> list[int]:
    """Return a distinct prompt for every number, so that the cache never hits."""
    text = f"Number {number}. " + "The river runs past the old library, and nobody knows how deep it is. " * 8
    return llm.tokenizer.encode(text).tolist()[:PROMPT_TOKENS]


def _speed(llm: LLM, streams: int, number: int) -> float:
    """Return output tokens per second of `streams` concurrent requests, prefill included."""
    prompts = [_prompt(llm, 1000 * streams + 100 * number + i) for i in range(streams)]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    return sum(len(output.token_ids) for output in outputs) / seconds


class _Transformers:
    """`generate` of the same weights, dequantized to float32, in a separate process: its idle threads spin, and would
    slow ours down."""

    def __init__(self, llm: LLM):
        self._llm = llm
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve_transformers, args=(theirs,), daemon=True)
        self._process.start()

    def speed(self, number: int) -> float:
        self._pipe.send(_prompt(self._llm, number))
        return OUTPUT_TOKENS / self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def _serve_transformers(pipe: Any) -> None:
    """Reply to each prompt with the seconds of its generation; None ends."""
    import torch
    from transformers import AutoModelForCausalLM

    from freehold.models.loading.resolve import resolve_model

    path = resolve_model(None)
    model: Any = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    options = {"max_new_tokens": OUTPUT_TOKENS, "min_new_tokens": OUTPUT_TOKENS, "do_sample": False, "pad_token_id": 0}
    while (prompt := pipe.recv()) is not None:
        tokens = torch.tensor([prompt])
        started = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        assert output.shape[1] == tokens.shape[1] + OUTPUT_TOKENS
        pipe.send(time.perf_counter() - started)
