"""`freehold bench contention`: one stream and sixteen, alone and beside processes that want the same cores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from freehold.bench.peers.entrant import Entrant, processor, send, start
from freehold.bench.peers.export import exported
from freehold.bench.peers.peer import FREEHOLD, PEERS
from freehold.bench.workloads import WORKLOADS
from freehold.config import KV_BYTES_DEFAULT
from freehold.models.loading.resolve import open_checkpoint, resolve_model

BUSY = (0, 1, 2)  # processes
WANTED = ("W1", "W2")
Figures = dict[tuple[str, str, int], list[float]]  # by engine, workload and busy processes: tokens a second


def run_contention(names: list[str], rounds: int, log: Path) -> int:
    """Print tokens a second of each engine -> exit code 0. Raises RuntimeError if an engine does not start, ValueError
    for a name that is not known."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ValueError(f"peer: {unknown[0]} is not known; there are {', '.join(PEERS)}")
    console = Console(stderr=True)
    for peer in (PEERS[name] for name in names):
        with console.status(f"Installing {peer.name} (once; it may be built from source) ..."):
            peer.install()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        model = exported(resolve_model(None))
        (layout,) = open_checkpoint(model.gguf).spec.cache_layouts()
        tokens = KV_BYTES_DEFAULT // layout.page_bytes("float32", 1) // 512 * 512
        peers = (FREEHOLD, *(PEERS[name] for name in names))
        entrants = [start(peer, model, tokens, log, stack, console) for peer in peers]
        _show(entrants, _measure(entrants, rounds, console), rounds)
    return 0


def _measure(entrants: list[Entrant], rounds: int, console: Console) -> Figures:
    """The first round warms up, without anybody beside."""
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
    title = f"Tokens a second on {processor()}, {os.cpu_count()} cores; medians of {rounds} rounds"
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
