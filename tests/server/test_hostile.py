"""Hostile clients beside well-behaved ones: what they do costs the others little, and leaves nothing behind."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from collections import Counter

import httpx
import numpy as np
import pytest
from processes import rss_by_process

from freehold.server.child import running_server

CLIENTS = 200
HOSTILE = 40  # of them
SECONDS = float(os.environ.get("FREEHOLD_HOSTILE_SECONDS", "600"))
QUIET_SHARE = 0.25  # of the time, without hostile ones
ABORTS = 5_000
PINS = 3_000
QUEUE = 400


class Crowd:
    """Well-behaved clients, and the gaps between the tokens that they get."""

    def __init__(self, client: httpx.AsyncClient):
        self.client = client
        self.gaps: list[float] = []
        self.tally: Counter[str] = Counter()

    async def live(self, number: int, until: float) -> None:
        rng = random.Random(number)
        session = None
        while time.monotonic() < until:
            prompt = [rng.randrange(100, 400) for _ in range(rng.randint(2, 20))]
            count = rng.randint(4, 16)
            if number % 3 == 0:
                body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": count, "ignore_eos": True}}
                await self._stream("/generate", {**body, "stream": True})
            elif number % 3 == 1:
                messages = [{"role": "user", "content": " ".join(map(str, prompt))}]
                await self._stream("/v1/chat/completions", {"messages": messages, "max_tokens": count, "stream": True})
            else:
                session = session or (await self.client.post("/v1/sessions", json={"timeout": 600})).json().get("id")
                body = {"prompt": prompt, "max_tokens": count, "session_id": session, "stream": True}
                if not await self._stream("/v1/completions", body) and session:
                    await self.client.delete(f"/v1/sessions/{session}")
                    session = None

    async def _stream(self, path: str, body: dict) -> bool:
        last = None
        async with self.client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                self.tally[f"refused {response.status_code}"] += 1
                assert response.status_code in (400, 503), await response.aread()
                await asyncio.sleep(0.2)  # before it asks again
                return False
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    if last is not None:
                        self.gaps.append(now - last)
                    last = now
        self.tally["answered"] += 1
        return True


class Attackers:
    """Each method is one attack, again and again."""

    def __init__(self, client: httpx.AsyncClient):
        self.client = client
        self.tally: Counter[str] = Counter()
        self._pins = itertools.count()

    async def live(self, number: int, until: float) -> None:
        attacks = [self.patterns, self.stops, self.queue, self.pins, self.leave, self.nonsense]
        rng = random.Random(number)
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError):
                await attacks[number % len(attacks)](rng)

    async def _post(self, path: str, body: dict | bytes, timeout: float = 60.0) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        answer = await self.client.post(path, content=content, headers=headers, timeout=timeout)
        self.tally[f"{path} {answer.status_code}"] += 1
        assert answer.status_code < 500 or answer.status_code == 503, answer.text
        return answer

    async def patterns(self, rng: random.Random) -> None:
        bad = [r"(a|aa)+$b", r"(.*)(.*)(.*)x", r"(\w+\s?)+!", r"([a-z]+)*\d", r"(?:.?){30}#", r"(a|b|c|d)*e"]
        body = {"prompt": "aaaa aaaa", "max_tokens": 40, "ignore_eos": True, "stop_regex": rng.sample(bad, 4)}
        await self._post("/v1/completions", body)
        await self._post("/v1/completions", {**body, "stop_regex": [r"(a)\1", "(" * 500]})

    async def stops(self, rng: random.Random) -> None:
        stops = ["e" * 2000, "\n\n", "é" * 50, " the", "\u0000", "日本", " ", "\\"]
        body = {"prompt": "Once upon", "max_tokens": 20, "stop": rng.sample(stops, 4)}
        await self._post("/v1/completions", body)
        await self._post("/v1/completions", b'{"prompt": "a", "stop": ["\\ud800"], "max_tokens": 3}')

    async def queue(self, rng: random.Random) -> None:
        await self._post("/v1/completions", {"prompt": "Once", "n": 64, "max_tokens": 2}, timeout=5.0)

    async def pins(self, rng: random.Random) -> None:
        number = next(self._pins)
        if number < PINS:
            await self._post("/v1/cache/pins", {"prompt": [number % 300 + 100] * 20, "id": f"pin {number}"})
        else:
            await asyncio.sleep(1)  # nothing follows

    async def leave(self, rng: random.Random) -> None:
        with contextlib.suppress(httpx.TimeoutException):
            body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
            await self._post("/v1/completions", body, timeout=rng.random())

    async def nonsense(self, rng: random.Random) -> None:
        bodies = [
            b"", b"{", b"[]", b'{"prompt": 7}', b'{"prompt": "a", "timeout": NaN}', b'{"prompt": "a", "timeout": 1e-9}',
            b'{"prompt": "a", "max_tokens": 99999999999999999999}', b'{"prompt": "a", "logit_bias": {"-1": 5}}',
        ]  # fmt: skip
        await self._post("/v1/completions", rng.choice(bodies))
        await asyncio.sleep(0.05)  # a client's pace


async def abort_while_paused(client: httpx.AsyncClient) -> None:
    """All of them submitted and aborted while nothing is computed."""
    assert (await client.post("/pause_generation", json={"mode": "in_place"})).status_code == 200

    async def one(number: int) -> None:
        body = {"rid": f"paused {number}", "input_ids": [number % 300 + 100] * 200}
        with contextlib.suppress(httpx.TimeoutException):
            await client.post("/generate", json=body, timeout=0.5)

    for start in range(0, ABORTS, 200):
        await asyncio.gather(*(one(number) for number in range(start, start + 200)))
    assert (await client.post("/continue_generation", json={})).status_code == 200


def percentiles(gaps: list[float]) -> str:
    return " ".join(f"p{q} {1e3 * np.percentile(gaps, q):.0f} ms" for q in (50, 90, 99))


async def attack(url: str) -> tuple[float, float, dict[str, list[int]]]:
    limits = httpx.Limits(max_connections=2 * CLIENTS + 300)
    sizes: dict[str, list[int]] = {"server": [], "engine": []}
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await abort_while_paused(client)
        results: list[list[float]] = []
        for seconds, hostile in ((SECONDS * QUIET_SHARE, 0), (SECONDS * (1 - QUIET_SHARE), HOSTILE)):
            until = time.monotonic() + seconds
            crowd, attackers = Crowd(client), Attackers(client)
            lives = [asyncio.create_task(crowd.live(i, until)) for i in range(CLIENTS - HOSTILE)]
            lives += [asyncio.create_task(attackers.live(i, until)) for i in range(hostile)]
            for part in (0.4, 0.95):
                await asyncio.sleep(max(until - time.monotonic() - (1 - part) * seconds, 0))
                for name, size in rss_by_process(url).items():
                    sizes[name].append(size)
            await asyncio.gather(*lives)
            print(f"{hostile} hostile: {percentiles(crowd.gaps)}; {dict(crowd.tally)}; {dict(attackers.tally)}")
            results.append(crowd.gaps)
    quiet, loud = (float(np.percentile(gaps, 99)) for gaps in results)
    return quiet, loud, sizes


@pytest.mark.hostile
@pytest.mark.timeout(SECONDS + 400)
def test_hostile_clients_cost_the_others_little_and_leave_nothing():
    flags = ("--num-pages", "1000", "--max-queued-requests", str(QUEUE), "--max-running-requests", "32")
    with running_server(*flags) as url:
        quiet, loud, sizes = asyncio.run(attack(url))
        print(f"p99 between tokens: {1e3 * quiet:.0f} ms quiet, {1e3 * loud:.0f} ms beside hostile ones; RSS {sizes}")
        assert loud <= 2 * quiet
        for name, (*_, middle, end) in sizes.items():
            assert end <= 1.05 * middle, f"{name} grows: {sizes}"
        time.sleep(2)  # until counts have been taken
        assert httpx.get(f"{url}/health").status_code == 200
        for pin in httpx.get(f"{url}/v1/cache/pins", timeout=30).json()["data"]:
            httpx.delete(f"{url}/v1/cache/pins/{pin['id']}", timeout=30)
        for session in httpx.get(f"{url}/v1/sessions", timeout=30).json()["data"]:
            httpx.delete(f"{url}/v1/sessions/{session['id']}", timeout=30)
        assert httpx.post(f"{url}/flush_cache", params={"timeout": 60}, timeout=90).status_code == 200
        memory = httpx.get(f"{url}/debug/memory", timeout=30).json()
        assert memory["leases"] == []
        assert memory["pages"]["free"] == memory["pages"]["capacity"] == 1000
