"""`freehold bench serve`"""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from freehold.bench.client import Load, Measured, measure
from freehold.server.launch import running_server


def bench_server(url: str | None, load: Load) -> Measured:
    """Measure the server at `url`, or one of our own, and print the result."""
    console = Console()
    with contextlib.ExitStack() as stack:
        target = url or stack.enter_context(running_server("--max-running-requests", str(load.concurrency)))
        progress = stack.enter_context(Progress(console=Console(stderr=True)))
        task = progress.add_task("Requests", total=load.num_prompts)
        asyncio.run(measure(target, Load(1, 2, load.input_len, 8, 0.0, seed=load.seed + 1)))  # warm-up
        result = asyncio.run(measure(target, load, lambda done: progress.update(task, completed=done)))
    console.print(report(result))
    return result


def report(result: Measured) -> Table:
    good = result.good
    table = Table("measure", "value", title=f"{len(good)} of {len(result.samples)} requests answered")
    table.columns[1].justify = "right"
    if not good:
        table.add_row("first error", result.samples[0].error)
        return table
    output = sum(sample.output_tokens for sample in good)
    prompt = sum(sample.prompt_tokens for sample in good)
    cached = sum(sample.cached_tokens for sample in good)
    first = np.array([sample.first_token for sample in good]) * 1e3
    gaps = np.array([gap for sample in good for gap in sample.gaps] or [0.0]) * 1e3
    table.add_row("wall time", f"{result.seconds:.2f} s")
    table.add_row("requests", f"{len(good) / result.seconds:.2f} /s")
    table.add_row("output tokens", f"{output / result.seconds:.1f} /s")
    table.add_row("prompt tokens", f"{prompt / result.seconds:.1f} /s")
    table.add_row("prefix hit rate", f"{cached / max(prompt, 1):.1%}")
    for name, values in (("time to first token", first), ("inter-token latency", gaps)):
        p50, p95, p99 = np.percentile(values, [50, 95, 99])
        table.add_row(f"{name}, p50 / p95 / p99", f"{p50:.1f} / {p95:.1f} / {p99:.1f} ms")
    return table
