"""`freehold bench peers`: A B A B, one engine awake at a time, prompts that no cache has seen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress

from freehold.bench.peers.export import exported
from freehold.bench.peers.peer import CONTEXT, FREEHOLD, PEERS, Model, Peer
from freehold.bench.peers.report import markdown, plot
from freehold.bench.peers.result import Result
from freehold.bench.peers.served import Served
from freehold.bench.workloads import WORKLOADS, Figures, Target, Workload
from freehold.config import KV_BYTES_DEFAULT
from freehold.models.loading.resolve import open_checkpoint, resolve_model

WAKE_REQUESTS, WAKE_TOKENS = 4, 32
# A server may close a connection that it has kept just when the next request is sent on it.
NO_KEEP_ALIVE = httpx.Limits(max_connections=64, max_keepalive_connections=0)


@dataclass
class _Entrant:
    served: Served
    start_seconds: float
    rounds: dict[str, list[Figures]]
    awake_seconds: float = 0.0
    cpu_seconds: float = 0.0


def run_peers(names: list[str], rounds: int, workloads: list[str], output: Path) -> int:
    """Measure, print the table and write `output`.json, .md and .png -> exit code 0 if all goals are met.

    An interrupt ends it early, with what has been measured. Raises RuntimeError if an engine does not start or
    nothing was measured, ValueError for a name that is not known.
    """
    console = Console(stderr=True)
    chosen = _choose(names, workloads)
    for peer in (PEERS[name] for name in names):
        with console.status(f"Installing {peer.name} (once; it may be built from source) ..."):
            peer.install()
    # Told to stop, it must not leave frozen engines behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        model = exported(resolve_model(None))
        # As much KV as we would take by default in float32: the same number of tokens for everybody.
        (layout,) = open_checkpoint(model.gguf).spec.cache_layouts()
        tokens = KV_BYTES_DEFAULT // layout.page_bytes("float32", 1) // 512 * 512
        assert tokens > CONTEXT
        peers = (FREEHOLD, *(PEERS[name] for name in names))
        entrants = [_start(peer, model, tokens, output, stack, console) for peer in peers]
        with contextlib.suppress(KeyboardInterrupt):
            _measure_all(entrants, chosen, rounds, console)
        results = [_conclude(entrant) for entrant in entrants]
    chosen = [workload for workload in chosen if all(workload.name in result.figures for result in results)]
    if not chosen:
        raise RuntimeError("interrupted before anything was measured")
    machine = f"{_processor()}, {os.cpu_count()} cores"
    done = min(len(entrant.rounds[workload.name]) for entrant in entrants for workload in chosen)
    table, is_met = markdown(machine, done, chosen, results)
    output.with_suffix(".json").write_text(json.dumps({"machine": machine, "engines": [asdict(r) for r in results]}))
    output.with_suffix(".md").write_text(table)
    plot(output.with_suffix(".png"), chosen, results)
    print(table)
    return 0 if is_met else 1


def _choose(names: list[str], workloads: list[str]) -> list[Workload]:
    for name in names:
        if name not in PEERS:
            raise ValueError(f"peer: {name} is not known; there are {', '.join(PEERS)}")
    known = {workload.name: workload for workload in WORKLOADS}
    for name in workloads:
        if name not in known:
            raise ValueError(f"workload: {name} is not known; there are {', '.join(known)}")
    return [known[name] for name in workloads] or list(WORKLOADS)


def _start(
    peer: Peer, model: Model, tokens: int, output: Path, stack: contextlib.ExitStack, console: Console
) -> _Entrant:
    """Frozen as soon as it is ready."""
    log = output.with_name(f"{output.name}-{peer.name}.log")
    with console.status(f"Starting {peer.name} ..."):
        started = time.monotonic()
        served = Served(peer, model, tokens, log)
        seconds = time.monotonic() - started
    stack.callback(served.close)
    served.freeze()
    return _Entrant(served, seconds, {})


def _measure_all(entrants: list[_Entrant], workloads: list[Workload], rounds: int, console: Console) -> None:
    with Progress(console=console) as progress:
        task = progress.add_task("Rounds", total=(rounds + 1) * len(workloads) * len(entrants))
        for number in range(rounds + 1):
            for workload in workloads:
                for entrant in entrants:
                    progress.update(task, description=f"{workload.name} {entrant.served.peer.name}")
                    _measure(entrant, workload, number)
                    progress.advance(task)


def _measure(entrant: _Entrant, workload: Workload, number: int) -> None:
    """The first round warms up."""
    seed = number * 1000 + int(workload.name[1:])
    with entrant.served.awake():
        before, started = entrant.served.cpu_seconds(), time.monotonic()
        figures = asyncio.run(_send(entrant.served.url, workload, seed))
        seconds, cpu = time.monotonic() - started, entrant.served.cpu_seconds() - before
    if number:
        entrant.rounds.setdefault(workload.name, []).append(figures)
        entrant.awake_seconds += seconds
        entrant.cpu_seconds += cpu


async def _send(url: str, workload: Workload, seed: int) -> Figures:
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=NO_KEEP_ALIVE) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        target = Target(client, model, seed)
        # While it was stopped its code went cold, and a busy machine may have dropped it from memory.
        for _ in range(WAKE_REQUESTS):
            await target.complete(target.tokens(WAKE_TOKENS), WAKE_TOKENS)
        return await workload.run(target)


def _conclude(entrant: _Entrant) -> Result:
    figures = {
        name: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for name, rounds in entrant.rounds.items()
    }
    peer, served = entrant.served.peer, entrant.served
    busy = entrant.cpu_seconds / max(entrant.awake_seconds, 1e-9)
    return Result(peer.name, peer.precision, figures, served.peak_memory() / 1e9, busy, entrant.start_seconds)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
