"""`freehold bench contention`: one stream and sixteen, alone and beside processes that compete for cores."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from freehold.bench.machine import machine
from freehold.bench.peers.entrant import Entrant, install, send, start_all
from freehold.bench.workloads import WORKLOADS

BUSY = (0, 1, 2)  # processes
WANTED = ("W1", "W2")
Figures = dict[tuple[str, str, int], list[float]]  # by engine, workload and busy processes: tokens per second


def run_contention(names: list[str], rounds: int, log: Path) -> int:
    """Print each engine's tokens per second. Return exit code 0. Raises RuntimeError if an engine does not start,
    ValueError for an unknown name."""
    console = Console(stderr=True)
    install(names, console)
    with contextlib.ExitStack() as stack:
        entrants = start_all(names, log, stack, console)
        _show(entrants, _measure(entrants, rounds, console), rounds)
    return 0


def _measure(entrants: list[Entrant], rounds: int, console: Console) -> Figures:
    """Measure all rounds. The first one warms up, without busy processes."""
    workloads = [workload for workload in WORKLOADS if workload.name in WANTED]
    figures: Figures = {}
    with Progress(console=console) as progress:
        task = progress.add_task("Rounds", total=(rounds + 1) * len(BUSY) * len(workloads) * len(entrants))
        for number in range(rounds + 1):
            for busy in BUSY:
                for workload in workloads:
                    for entrant in entrants:
                        name = entrant.served.peer.name
                        progress.update(task, description=f"{workload.name} {name} beside {busy}")
                        with entrant.served.awake(), _busy_processes(busy if number else 0):
                            found = asyncio.run(send(entrant.served.url, workload, number * 1000 + busy))
                        if number:
                            rate = next(iter(found.values()))
                            figures.setdefault((name, workload.name, busy), []).append(rate)
                        progress.advance(task)
    return figures


@contextlib.contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _show(entrants: list[Entrant], figures: Figures, rounds: int) -> None:
    columns = [f"{workload}, {'alone' if not busy else f'beside {busy}'}" for workload in WANTED for busy in BUSY]
    title = f"Tokens per second on {machine()}; medians of {rounds} rounds"
    table = Table("engine", *columns, title=title)
    for entrant in entrants:
        name = entrant.served.peer.name
        cells: list[str] = []
        for workload in WANTED:
            alone = statistics.median(figures[name, workload, 0])
            rates = [statistics.median(figures[name, workload, busy]) for busy in BUSY]
            cells += [f"{rate:.1f} ({rate / alone:.0%})" for rate in rates]
        table.add_row(name, *cells)
    Console(width=160).print(table)
