"""Everything at once, for ten minutes: speculation, forced retraction, aborts, pauses. Memory stays flat."""

import asyncio
import random
import time
from pathlib import Path

import httpx
import pytest
from completing import complete

from freehold.server.child import running_server

CLIENTS = 32
SECONDS = 600
WARM_UP_SECONDS = 150
PAUSE_SECONDS = 30
TEXT = "one two three four five six seven eight nine ten "


async def client_life(number: int, until: float, client: httpx.AsyncClient, tally: dict[str, int]) -> None:
    rng = random.Random(number)
    while time.monotonic() < until:
        body = {
            "prompt": TEXT * rng.randint(1, 4) + "one two" * rng.randint(0, 1),
            "max_tokens": rng.randint(1, 48),
            "stream": rng.random() < 0.5,
            "temperature": rng.choice([0, 0, 0.7]),
            "ignore_eos": True,
        }
        patience = rng.choice([None, None, rng.random() * 4])
        try:
            await asyncio.wait_for(complete(client, body), patience)
            tally["answered"] += 1
        except TimeoutError:
            tally["aborted"] += 1


async def operator(until: float, client: httpx.AsyncClient) -> None:
    """Pauses and continues, and looks whether all is well."""
    modes = ["retract", "in_place"]
    while time.monotonic() < until:
        await asyncio.sleep(PAUSE_SECONDS)
        modes.reverse()
        assert (await client.post("/pause_generation", json={"mode": modes[0]})).status_code == 200
        assert (await client.get("/health")).status_code == 200
        await asyncio.sleep(1)
        assert (await client.post("/continue_generation", json={})).status_code == 200
        memory = await client.get("/debug/memory")
        assert memory.status_code == 200, memory.text


def rss_by_process(port: str) -> dict[str, int]:
    """Bytes of the server and of its engine process."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text().split("\0")
            status = (folder / "status").read_text()
        except OSError:
            continue
        parent = status.split("PPid:\t")[1].split("\n")[0]
        if "--port" in command and port in command:
            found["server"] = folder.name, status
        if "freehold.ipc.engine_process" in command:
            found.setdefault("engines", []).append((parent, status))
    server, status = found["server"]
    engine = next(text for parent, text in found["engines"] if parent == server)
    return {
        name: 1024 * int(text.split("VmRSS:")[1].split()[0]) for name, text in (("server", status), ("engine", engine))
    }


async def soak(url: str) -> tuple[dict[str, int], dict[str, float]]:
    tally = {"answered": 0, "aborted": 0}
    now = time.monotonic()
    until = now + SECONDS
    limits = httpx.Limits(max_connections=CLIENTS * 2 + 4)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        lives = [asyncio.create_task(client_life(i, until, client, tally)) for i in range(CLIENTS)]
        lives.append(asyncio.create_task(operator(until, client)))
        port = url.rpartition(":")[2]
        await asyncio.sleep(WARM_UP_SECONDS)
        before = rss_by_process(port)
        await asyncio.sleep(until - time.monotonic() - 5)
        after = rss_by_process(port)
        await asyncio.gather(*lives)
    return tally, {name: after[name] / before[name] - 1 for name in before}


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
def test_a_soak():
    # Few pages, so that all of them have been touched when the warm-up is over.
    flags = (
        "--speculative-algorithm", "ngram", "--forward-retract-interval", "3", "--audit-interval", "5",
        "--num-pages", "120", "--max-running-requests", "4",
    )  # fmt: skip
    with running_server(*flags) as url:
        tally, growth = asyncio.run(soak(url))
        print(tally, growth)
        assert tally["answered"] > tally["aborted"] > 10
        assert all(share < 0.02 for share in growth.values()), growth
        time.sleep(2)
        memory = httpx.get(f"{url}/debug/memory", timeout=30).json()
        assert memory["leases"] == []
        httpx.post(f"{url}/flush_cache", timeout=30)
        counts = httpx.get(f"{url}/debug/memory", timeout=30).json()["pages"]
        assert counts["free"] == counts["capacity"] == 120
        metrics = httpx.get(f"{url}/metrics").text
        value = {
            line.partition("{")[0]: float(line.split()[-1])
            for line in metrics.splitlines()
            if line.startswith(("vllm", "freehold"))
        }
        assert value["vllm:spec_decode_num_accepted_tokens_total"] > 100
        assert value["vllm:num_preemptions_total"] > 100
