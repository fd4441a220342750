"""The cost of scheduling: the real scheduler and memory, with an engine that answers instantly."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from freehold.bench.peers.export import exported
from freehold.bench.peers.peer import FOLDER, PEERS
from freehold.bench.prefix_tree import evict_us, prefix_match_us, publish_us
from freehold.config import EngineConfig
from freehold.contract.sampling_params import SamplingParams
from freehold.contract.vocabulary import Vocabulary
from freehold.memory import Memory, MemoryShape
from freehold.models.loading.resolve import resolve_model
from freehold.scheduler.request import Request
from freehold.scheduler.scheduler import Scheduler
from freehold.simulation.engine import InstantEngine, vocabulary_fields

BATCHES = (1, 16, 64, 256, 1024)
STEPS = 400
PROMPT = 128
CONTEXTS = (1_000, 8_000, 32_000, 128_000)
TOKENS_MAX = 1 << 23  # of all sequences together


def decode_step_us(
    sequences: int, context: int = PROMPT, steps: int = STEPS, page_size: int = 16,
    memory_of: Callable[[MemoryShape], Memory] = Memory, before: Callable[[], None] = lambda: None,
) -> float:  # fmt: skip
    """Return median microseconds of one whole iteration with `sequences` requests decoding after `context` tokens.
    `before` is called before each."""
    config = EngineConfig(
        page_size=page_size, max_running_requests=sequences, chunked_prefill_size=1 << 20, max_queued_requests=1 << 16
    )
    limit = context + steps + 64
    pages = sequences * (limit // page_size + 2)
    memory = memory_of(MemoryShape(pages, page_size, sequences, limit))
    scheduler = Scheduler(config, memory, InstantEngine(), Vocabulary(**vocabulary_fields(1000, (0,))))
    params = SamplingParams(temperature=0, max_tokens=steps + 32, ignore_eos=True)
    rng = np.random.default_rng(0)
    for i in range(sequences):
        prompt = rng.integers(2, 1000, context).astype(np.int32)
        scheduler.add(Request(id=str(i), prompt=prompt, params=params))
    while len(scheduler.running) < sequences or scheduler.running.todo(scheduler.running.order).max() > 0:
        scheduler.step()
    times: list[float] = []
    for _ in range(steps):
        before()
        started = time.perf_counter()
        scheduler.step()
        times.append(time.perf_counter() - started)
    return float(np.median(times)) * 1e6


def show_scheduler_cost(beside_vllm: bool) -> None:
    """Print the costs. Raises RuntimeError if vLLM can't be installed or run."""
    console = Console(soft_wrap=True)
    with console.status("Measuring ..."):
        theirs = _vllm_step_us() if beside_vllm else {}
        table = Table("sequences", "one decode step", "a sequence", title="Scheduler and memory, no model")
        for name in ("vLLM", "vLLM over ours") if beside_vllm else ():
            table.add_column(name)
        for batch in BATCHES:
            cost = decode_step_us(batch)
            beside = [f"{theirs[batch]:.0f} us", f"{theirs[batch] / cost:.1f} x"] if beside_vllm else []
            table.add_row(str(batch), f"{cost:.0f} us", f"{cost / batch:.2f} us", *beside)
        contexts = Table("sequences", *(f"{context:,} tokens" for context in CONTEXTS), title="One decode step, us")
        for batch in (1, 16, 64, 256):
            costs = [
                f"{decode_step_us(batch, context, 100):.0f}" if batch * context <= TOKENS_MAX else ""
                for context in CONTEXTS
            ]
            contexts.add_row(str(batch), *costs)
        matches = Table("prompt", "match + lease + release", "publish", title="Prefix tree")
        for tokens in (1_000, 32_000, 128_000):
            matches.add_row(f"{tokens:,} tokens", f"{prefix_match_us(tokens):.0f} us", f"{publish_us(tokens):.0f} us")
        evictions = Table("pages of a leaf", "a page", title="Eviction of 1,024 pages among 100,000 leaves")
        for pages in (1, 4, 16):
            evictions.add_row(str(pages), f"{evict_us(100_000, pages):.2f} us")
    for one in (table, contexts, matches, evictions):
        console.print(one)


def _vllm_step_us() -> dict[int, float]:
    """Schedule the same requests with vLLM in a separate environment."""
    peer, model = PEERS["vllm"], exported(resolve_model(None))
    peer.install()
    script = str(FOLDER / "vllm_scheduler.py")
    command = [str(peer.python), script, str(model.folder), str(PROMPT), str(STEPS), *map(str, BATCHES)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **peer.environment})
    if ran.returncode:
        raise RuntimeError(f"vLLM's scheduler failed: {ran.stderr[-2000:]}")
    return {int(count): cost for count, cost in json.loads(ran.stdout.splitlines()[-1]).items()}
