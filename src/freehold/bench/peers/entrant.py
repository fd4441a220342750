"""An engine in a comparison, and one round of a workload."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from freehold.bench.peers.export import exported
from freehold.bench.peers.peer import CONTEXT, OURS, PEERS, Model, Peer
from freehold.bench.peers.served import Served
from freehold.bench.workloads import Figures, Target, Workload
from freehold.config import KV_BYTES_DEFAULT
from freehold.models.loading.resolve import open_checkpoint, resolve_model

WAKE_REQUESTS, WAKE_TOKENS = 4, 32
# A server may close a kept connection just when the next request is sent on it.
NO_KEEP_ALIVE = httpx.Limits(max_connections=64, max_keepalive_connections=0)


@dataclass
class Entrant:
    served: Served
    start_seconds: float
    rounds: dict[str, list[Figures]]
    awake_seconds: float = 0.0
    cpu_seconds: float = 0.0


def install(names: list[str], console: Console) -> None:
    """Install the named peers once. Raises ValueError for an unknown name."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ValueError(f"peer: {unknown[0]} is not known; there are {', '.join(PEERS)}")
    for name in names:
        with console.status(f"Installing {name} (once; it may be built from source) ..."):
            PEERS[name].install()


def start_all(names: list[str], output: Path, stack: contextlib.ExitStack, console: Console) -> list[Entrant]:
    """Start Freehold, in its default and its fastest mode, and the named peers, all frozen; the stack ends them. Raises
    RuntimeError if one does not start."""
    # On SIGTERM, do not leave frozen engines behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    model = exported(resolve_model(None))
    # Our default KV size in float32: the same number of tokens for every engine.
    (layout,) = open_checkpoint(model.gguf).spec.cache_layouts()
    tokens = KV_BYTES_DEFAULT // layout.page_bytes("float32", 1) // 512 * 512
    assert tokens > CONTEXT
    peers = (*OURS, *(PEERS[name] for name in names))
    return [_start(peer, model, tokens, output, stack, console) for peer in peers]


def _start(
    peer: Peer, model: Model, tokens: int, output: Path, stack: contextlib.ExitStack, console: Console
) -> Entrant:
    """Start an engine, and freeze it as soon as it is ready."""
    log = output.with_name(f"{output.name}-{peer.name.replace(' ', '-')}.log")
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
        # While it was frozen, its code left the CPU caches, and a busy machine may have paged it out.
        for _ in range(WAKE_REQUESTS):
            await target.complete(target.tokens(WAKE_TOKENS), WAKE_TOKENS)
        return await workload.run(target)
