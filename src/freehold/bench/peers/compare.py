"""`freehold bench peers`: A B A B, one engine awake at a time, with uncached prompts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

from freehold.bench.machine import machine
from freehold.bench.peers.entrant import Entrant, install, send, start_all
from freehold.bench.peers.report import markdown, plot
from freehold.bench.peers.result import Result
from freehold.bench.workloads import WORKLOADS, Workload

Combined = TypeVar("Combined")


def run_peers(names: list[str], rounds: int, workloads: list[str], output: Path) -> int:
    """Measure, print the table, write `output`.json, .md and .png, and append a line to `output`-history.jsonl. Return
    exit code 0 if all goals are met.

    An interrupt ends it early with the measurements so far. Raises RuntimeError if an engine does not start or nothing
    was measured, ValueError for an unknown name.
    """
    console = Console(stderr=True)
    chosen = _choose(workloads)
    install(names, console)
    with contextlib.ExitStack() as stack:
        entrants = start_all(names, output, stack, console)
        with contextlib.suppress(KeyboardInterrupt):
            _measure_all(entrants, chosen, rounds, console)
        results = [_conclude(entrant) for entrant in entrants]
    chosen = [workload for workload in chosen if all(workload.name in result.figures for result in results)]
    if not chosen:
        raise RuntimeError("interrupted before anything was measured")
    done = min(len(entrant.rounds[workload.name]) for entrant in entrants for workload in chosen)
    table, is_met = markdown(machine(), done, chosen, results)
    found = {"machine": machine(), "rounds": done, "engines": [asdict(result) for result in results]}
    output.with_suffix(".json").write_text(json.dumps(found))
    with output.with_name(f"{output.name}-history.jsonl").open("a") as history:
        history.write(json.dumps({"date": datetime.now(UTC).isoformat(timespec="seconds"), **found}) + "\n")
    output.with_suffix(".md").write_text(table)
    plot(output.with_suffix(".png"), chosen, results)
    print(table)
    return 0 if is_met else 1


def _choose(workloads: list[str]) -> list[Workload]:
    known = {workload.name: workload for workload in WORKLOADS}
    for name in workloads:
        if name not in known:
            raise ValueError(f"workload: {name} is not known; there are {', '.join(known)}")
    return [known[name] for name in workloads] or list(WORKLOADS)


def _measure_all(entrants: list[Entrant], workloads: list[Workload], rounds: int, console: Console) -> None:
    with Progress(console=console) as progress:
        task = progress.add_task("Rounds", total=(rounds + 1) * len(workloads) * len(entrants))
        for number in range(rounds + 1):
            for workload in workloads:
                for entrant in entrants:
                    progress.update(task, description=f"{workload.name} {entrant.served.peer.name}")
                    _measure(entrant, workload, number)
                    progress.advance(task)


def _measure(entrant: Entrant, workload: Workload, number: int) -> None:
    """Measure a workload once. The first round warms up."""
    seed = number * 1000 + int(workload.name[1:])
    with entrant.served.awake():
        before, started = entrant.served.cpu_seconds(), time.monotonic()
        figures = asyncio.run(send(entrant.served.url, workload, seed))
        seconds, cpu = time.monotonic() - started, entrant.served.cpu_seconds() - before
    if number:
        entrant.rounds.setdefault(workload.name, []).append(figures)
        entrant.awake_seconds += seconds
        entrant.cpu_seconds += cpu


def _conclude(entrant: Entrant) -> Result:
    figures, spread = _over(entrant, statistics.median), _over(entrant, lambda values: (min(values), max(values)))
    peer, served = entrant.served.peer, entrant.served
    busy = entrant.cpu_seconds / max(entrant.awake_seconds, 1e-9)
    memory = served.peak_memory() / 1e9
    return Result(peer.name, peer.precision, figures, spread, memory, busy, entrant.start_seconds, peer.is_ours)


def _over(entrant: Entrant, combine: Callable[[list[float]], Combined]) -> dict[str, dict[str, Combined]]:
    """Combine the rounds of each figure of each workload."""
    return {
        name: {key: combine([one[key] for one in rounds]) for key in rounds[0]}
        for name, rounds in entrant.rounds.items()
    }
