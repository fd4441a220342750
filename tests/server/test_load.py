"""Many clients that leave at random, on a quarter of the memory they want."""

import asyncio
import random

import httpx
import pytest
from completing import complete

from freehold.server.child import running_server

PAGE_SIZE = 16


async def client_life(number: int, requests: int, client: httpx.AsyncClient, tally: dict[str, int]) -> None:
    """`requests` short completions one after another, some of them abandoned."""
    rng = random.Random(number)
    for _ in range(requests):
        body = {
            "prompt": [rng.randrange(100, 400) for _ in range(rng.randint(1, 8))],
            "max_tokens": rng.randint(1, 4),
            "ignore_eos": True,
            "stream": rng.random() < 0.5,
            "temperature": rng.choice([0, 0.8]),
        }
        if rng.random() < 0.5:
            body["prompt"] = [7] * 32 + body["prompt"]
        patience = rng.choice([None, None, None, rng.random() * 0.3])
        try:
            await asyncio.wait_for(complete(client, body), patience)
            tally["answered"] += 1
        except TimeoutError:
            tally["aborted"] += 1


async def storm(url: str, clients: int, requests: int) -> dict[str, int]:
    tally = {"answered": 0, "aborted": 0}
    limits = httpx.Limits(max_connections=clients * 2)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await asyncio.gather(*(client_life(i, requests, client, tally) for i in range(clients)))
    return tally


def weather(clients: int, requests: int) -> None:
    # Each client wants up to 44 tokens, 3 pages; a quarter of that.
    pages = clients * 3 // 4
    flags = ("--num-pages", str(pages), "--page-size", str(PAGE_SIZE), "--max-running-requests", str(clients))
    with running_server(*flags, "--audit-interval", "10") as url:
        tally = asyncio.run(storm(url, clients, requests))
        print(tally)
        assert sum(tally.values()) == clients * requests
        assert tally["aborted"] > 0
        assert tally["answered"] > tally["aborted"]
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "Still", "max_tokens": 4}, timeout=60)
        assert answer.status_code == 200, "the server answers after"
        assert httpx.get(f"{url}/health").status_code == 200
        memory = httpx.get(f"{url}/debug/memory", timeout=30).json()
        assert memory["leases"] == []
        assert memory["waiting"] == 0
        freed = httpx.post(f"{url}/flush_cache").headers["x-flushed-pages"]
        counts = httpx.get(f"{url}/debug/memory", timeout=30).json()["pages"]
        assert counts["free"] == counts["capacity"] == pages, f"leaked after flushing {freed}"


@pytest.mark.thorough
def test_a_short_storm():
    weather(clients=64, requests=4)


@pytest.mark.load
@pytest.mark.timeout(5400)
def test_a_long_storm():
    weather(clients=64, requests=1000)
