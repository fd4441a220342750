"""`freehold bench check`: detects slowdowns since the last run on this kind of processor.

Machines differ from day to day, and a shared one from minute to minute. So the figure is how much Freehold does in the
time of a fixed NumPy calculation, which Freehold can't change.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from freehold.bench.load import VOCABULARY
from freehold.bench.machine import machine
from freehold.bench.scheduler import decode_step_us
from freehold.contract.sampling_params import SamplingParams
from freehold.llm import LLM
from freehold.models.loading.bundled import models_folder

ROUNDS = 5
LOSS = 0.10
Figures = dict[str, float]  # by workload: runs per calculation time


def run_check(history: Path | None = None) -> int:
    """Measure, print, and append a line to `history`. Return exit code 1 if anything became more than 10 % slower."""
    history = history or models_folder().parent / "bench" / "check.jsonl"
    kind = machine()
    before = last_figures(history, kind)
    with Console(stderr=True).status("Measuring, about three minutes ..."):
        figures = _measure()
    table = Table("workload", "now", "the last time", "ratio", title=f"Work during a fixed calculation: {kind}")
    for name, value in figures.items():
        old = before.get(name)
        known = ("", "") if old is None else (f"{old:.3g}", f"{value / old:.2f} x")
        table.add_row(name, f"{value:.3g}", *known)
    Console().print(table)
    slower = losses(figures, before)
    if slower:
        print(
            f"slower than the last time: {', '.join(slower)}. That is a loss of speed, or a disturbed machine: repeat"
        )
        return 1
    history.parent.mkdir(parents=True, exist_ok=True)
    line = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": kind, "figures": figures}
    with history.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return 0


def last_figures(history: Path, kind: str) -> Figures:
    """Return the last figures for this kind of machine; empty if there are none."""
    lines = history.read_text().splitlines() if history.exists() else []
    found = [entry["figures"] for entry in map(json.loads, lines) if entry["machine"] == kind]
    return found[-1] if found else {}


def losses(figures: Figures, before: Figures) -> list[str]:
    """Return the workloads that became more than 10 % slower."""
    return [name for name, value in figures.items() if value < (1 - LOSS) * before.get(name, 0.0)]


def _measure() -> Figures:
    """Return medians. Each workload is measured between two calculations, and the first round warms up."""
    found: dict[str, list[float]] = {}
    with LLM(max_running_requests=16) as llm:
        for number in range(ROUNDS + 1):
            for name, work in _workloads(llm, number).items():
                before = _calculation()
                started = time.perf_counter()
                work()
                seconds = time.perf_counter() - started
                if number:
                    found.setdefault(name, []).append((before + _calculation()) / 2 / seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def _calculation() -> float:
    """Return the seconds of matrix products and a Python loop."""
    values = np.ones((768, 768), np.float32)
    started = time.perf_counter()
    for _ in range(20):
        values = values @ values * np.float32(1 / 768)
    total = 0
    for i in range(1_000_000):
        total += i
    return time.perf_counter() - started


def _workloads(llm: LLM, number: int) -> dict[str, Callable[[], object]]:
    """Return the workloads of `bench peers`, offline and shorter. Prompts are new in each round."""
    rng = np.random.default_rng(number)

    def prompts(count: int, size: int, begin: tuple[int, ...] = ()) -> list[list[int]]:
        return [[*begin, *rng.choice(VOCABULARY, size).tolist()] for _ in range(count)]

    def generate(texts: list[list[int]], tokens: int) -> Callable[[], object]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return lambda: llm.generate(texts, params)

    def talk() -> None:
        histories = prompts(8, 64)
        for _ in range(3):
            outputs = llm.generate(histories, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
            more = prompts(8, 40)
            histories = [
                [*history, *output.token_ids, *question]
                for history, output, question in zip(histories, outputs, more, strict=True)
            ]

    shared = tuple(rng.choice(VOCABULARY, 1200).tolist())
    return {
        "W1, one stream": generate(prompts(1, 64), 64),
        "W2, 16 streams": generate(prompts(16, 64), 32),
        "W3, a prompt of 1,500": generate(prompts(1, 1500), 1),
        "W4, a shared prefix": generate(prompts(16, 64, shared), 16),
        "W5, conversations": talk,
        "scheduler, 256 sequences": lambda: decode_step_us(256, steps=200),
    }
