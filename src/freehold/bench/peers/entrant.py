"""An engine that takes part in a comparison, and one round of a workload."""

from __future__ import annotations

import contextlib
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from freehold.bench.peers.peer import Model, Peer
from freehold.bench.peers.served import Served
from freehold.bench.workloads import Figures, Target, Workload

WAKE_REQUESTS, WAKE_TOKENS = 4, 32
# A server may close a connection that it has kept just when the next request is sent on it.
NO_KEEP_ALIVE = httpx.Limits(max_connections=64, max_keepalive_connections=0)


@dataclass
class Entrant:
    served: Served
    start_seconds: float
    rounds: dict[str, list[Figures]]
    awake_seconds: float = 0.0
    cpu_seconds: float = 0.0


def start(
    peer: Peer, model: Model, tokens: int, output: Path, stack: contextlib.ExitStack, console: Console
) -> Entrant:
    """Frozen as soon as it is ready."""
    log = output.with_name(f"{output.name}-{peer.name}.log")
    with console.status(f"Starting {peer.name} ..."):
        started = time.monotonic()
        served = Served(peer, model, tokens, log)
        seconds = time.monotonic() - started
    stack.callback(served.close)
    served.freeze()
    return Entrant(served, seconds, {})


async def send(url: str, workload: Workload, seed: int) -> Figures:
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=NO_KEEP_ALIVE) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        target = Target(client, model, seed)
        # While it was stopped its code went cold, and a busy machine may have dropped it from memory.
        for _ in range(WAKE_REQUESTS):
            await target.complete(target.tokens(WAKE_TOKENS), WAKE_TOKENS)
        return await workload.run(target)


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
