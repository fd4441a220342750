"""`freehold bench serve`: a load on a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from freehold.bench.client import Measured, Sample, measure
from freehold.bench.load import Load
from freehold.server.child import running_server

LATENCIES = {
    "ttft": ("time to first token", lambda sample: [sample.first_token]),
    "tpot": ("time per output token", lambda sample: [sample.per_token]),
    "itl": ("inter-token latency", lambda sample: sample.gaps),
    "e2el": ("whole request", lambda sample: [sample.total]),
}


@dataclass(frozen=True)
class Objectives:
    """Latency limits of a request in milliseconds: ttft, tpot, e2el."""

    limits: dict[str, float]

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Objectives:
        """Parse ["ttft:500", "tpot:50"]. Raises ValueError naming the flag."""
        limits: dict[str, float] = {}
        for text in texts:
            name, colon, limit = text.partition(":")
            if not colon or name not in ("ttft", "tpot", "e2el"):
                raise ValueError(f"goodput: '{text}' is not one of ttft, tpot, e2el, a colon and milliseconds")
            try:
                limits[name] = float(limit)
            except ValueError:
                raise ValueError(f"goodput: '{limit}' in '{text}' is no number of milliseconds") from None
        return cls(limits)

    def met_by(self, sample: Sample) -> bool:
        return all(max(LATENCIES[name][1](sample)) * 1e3 <= limit for name, limit in self.limits.items())


def bench_server(url: str | None, load: Load, objectives: Objectives, output: Path | None) -> Measured:
    """Measure the server at `url`, or our own, print the result and write it to `output` as JSON."""
    console = Console()
    with contextlib.ExitStack() as stack:
        flags = [] if load.concurrency is None else ["--max-running-requests", str(load.concurrency)]
        target = url or stack.enter_context(running_server(*flags))
        progress = stack.enter_context(Progress(console=Console(stderr=True)))
        task = progress.add_task("Requests", total=len(load.requests))
        asyncio.run(measure(target, Load.random(1, 2, 64, 8, 0.0, seed=1)))  # warm-up
        result = asyncio.run(measure(target, load, lambda done: progress.update(task, completed=done)))
    figures = summary(result, objectives)
    console.print(report(result, figures))
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n")
    return result


def summary(result: Measured, objectives: Objectives) -> dict[str, float]:
    """Return figures by name; latencies in ms."""
    good = result.good
    prompt = sum(sample.prompt_tokens for sample in good)
    figures = {
        "wall time, s": result.seconds,
        "requests/s": len(good) / result.seconds,
        "output tokens/s": sum(sample.output_tokens for sample in good) / result.seconds,
        "prompt tokens/s": prompt / result.seconds,
        "prefix hit rate": sum(sample.cached_tokens for sample in good) / max(prompt, 1),
    }
    if objectives.limits:
        within = sum(map(objectives.met_by, good))
        figures["goodput, requests/s"] = within / result.seconds
        figures["within the objectives"] = within / max(len(result.samples), 1)
    for name, of in LATENCIES.values():
        values = [value for sample in good for value in of(sample)]
        if values:
            for percent, value in zip((50, 95, 99), np.percentile(values, [50, 95, 99]), strict=True):
                figures[f"{name} p{percent}, ms"] = 1e3 * float(value)
    return figures


def report(result: Measured, figures: dict[str, float]) -> Table:
    table = Table("measure", "value", title=f"{len(result.good)} of {len(result.samples)} requests answered")
    table.columns[1].justify = "right"
    if not result.good:
        table.add_row("first error", result.samples[0].error)
        return table
    for name, value in figures.items():
        table.add_row(name, f"{value:.2f}")
    return table
