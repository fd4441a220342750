"""NVIDIA Dynamo's standalone indexer follows the events: it must answer lookups as the engine does."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.contract.sampling_params import SamplingParams
from freehold.events.config import EventsConfig
from freehold.events.publisher import EventPublisher
from freehold.memory import PrefetchPolicy, WritePolicy
from freehold.memory.events import EventLog
from freehold.scheduler.request import Request
from freehold.server.child import free_port
from freehold.simulation.assembly import SimulatedTiers, assemble
from freehold.simulation.mover import Faults

PYTHON = Path(os.environ.get("CONFORMANCE_PYTHON", sys.executable))
SIZE, PAGES, REQUESTS = 16, 160, 10_000
DOCUMENTS, PARAGRAPHS, PARAGRAPH = 30, 6, 40  # tokens: prompts are paragraphs in turn, so that they share beginnings


@contextlib.contextmanager
def indexer(endpoint: str, replay: str):
    port = free_port()
    command = [PYTHON, "-m", "dynamo.indexer", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    worker = {"instance_id": 1, "model_name": "simulated", "block_size": SIZE}
    worker |= {"endpoint": endpoint, "replay_endpoint": replay}
    try:
        end = time.monotonic() + 30
        while True:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{url}/workers")
                break
            assert time.monotonic() < end
            time.sleep(0.1)
        registered = httpx.post(f"{url}/register", json=worker)
        assert registered.status_code in (200, 201), registered.text
        yield url
    finally:
        process.terminate()
        process.wait(10)


def prompts(rng: np.random.Generator) -> np.ndarray:
    """A document up to some paragraph, and the beginning of another one."""
    document = int(rng.integers(DOCUMENTS))
    parts = [
        np.random.default_rng([document, paragraph]).integers(0, 900, PARAGRAPH)
        for paragraph in range(int(rng.integers(1, PARAGRAPHS + 1)))
    ]
    own = rng.integers(0, 900, int(rng.integers(1, 50)))
    return np.concatenate([*parts, own]).astype(np.int32)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", list(WritePolicy))
def test_the_indexer_answers_as_the_engine_does(policy):
    live, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    config = EventsConfig(True, endpoint=live.replace("127.0.0.1", "*"), replay_endpoint=replay, buffer_steps=100_000)
    publisher, log, rng = EventPublisher(config, SIZE), EventLog(SIZE), np.random.default_rng(7)
    options = EngineConfig(page_size=SIZE, num_pages=PAGES, max_running_requests=8, chunked_prefill_size=128)
    faults = Faults(slow=0.05, failing=0.05, seed=1)
    tiers = SimulatedTiers(policy, 2.0, faults, PrefetchPolicy.TIMEOUT)
    server = assemble(options, 400, tiers=tiers, events=log)
    memory, scheduler, mover = server.memory, server.scheduler, server.mover

    def iterate() -> None:
        scheduler.step()
        mover.advance()
        publisher.publish(log.take())

    with indexer(live, replay) as url:
        for number in range(REQUESTS):
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            scheduler.add(Request(f"r{number}", prompts(rng), params))
            while len(scheduler.requests) > 8:
                iterate()
        while scheduler.has_work or memory.awaits_transfers:
            iterate()
        assert memory.tree.evictor.evicted_page_count > REQUESTS
        assert sum(pages.evicted_count for pages in memory.tiers.host.pages) > 1000
        assert memory.tiers.storage.fetched > 100
        asked = [prompts(rng) for _ in range(500)]
        expected = [reach(memory, tokens) for tokens in asked]
        assert len({device for device, _ in expected}) > 5
        assert any(host > device for device, host in expected)
        end = time.monotonic() + 30
        while (found := [answer(url, tokens) for tokens in asked]) != expected and time.monotonic() < end:
            time.sleep(1)  # batches are under way
        wrong = [(at, one, other) for at, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
        assert not wrong, f"{len(wrong)} answers differ: {wrong[:5]}"
    publisher.close()


def reach(memory, tokens) -> tuple[int, int]:
    """Tokens that the device has, and that device and host have together."""
    whole = np.append(tokens, np.int32(0))
    match = memory.match("", whole)
    plan = memory.tiers.loads.plan(match, memory.tiers.keys(match.namespace, whole), len(tokens))
    return match.length, match.length if plan is None else plan.boundary


def answer(url: str, tokens) -> tuple[int, int]:
    found = httpx.post(f"{url}/query", json={"token_ids": tokens.tolist(), "model_name": "simulated"}).json()
    one = found["instances"].get("1", {"gpu": 0, "cpu": 0})
    return one["gpu"], one["cpu"]
