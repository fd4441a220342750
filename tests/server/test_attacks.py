"""Attacks in turns, beside a client that behaves: it hardly notices, and nothing is left of them."""

import asyncio
import multiprocessing
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import httpx
import numpy as np
import pytest
from attacks import ATTACKS, run_attack
from leftovers import check_nothing_is_left
from processes import rss_by_process

from freehold.server.child import running_server

SECONDS = float(os.environ.get("FREEHOLD_HOSTILE_SECONDS", "600"))
MEMORY_MAX = 1 << 30
HEALTH_MAX_S = 0.1
SLOWDOWN_MAX = 2.0


@dataclass
class Guest:
    """A client that behaves: short answers, one after another, and never an error."""

    url: str
    times: list[float] = field(default_factory=list)

    async def live(self, until: float) -> None:
        headers = {"Authorization": "Bearer good"}
        rng = random.Random(1)
        async with httpx.AsyncClient(base_url=self.url, timeout=60, headers=headers) as client:
            while time.monotonic() < until:
                prompt = [rng.randrange(100, 9000) for _ in range(10)]
                body = {"prompt": prompt, "max_tokens": 10, "ignore_eos": True, "temperature": 0}
                started = time.monotonic()
                answer = await client.post("/v1/completions", json=body)
                self.times.append(time.monotonic() - started)
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] == 10

    @property
    def p99(self) -> float:
        return float(np.percentile(self.times, 99))


@dataclass
class Watch:
    """Looks at the server's health and memory all the time."""

    url: str
    health: list[float] = field(default_factory=list)
    memory: int = 0

    async def live(self, until: float) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as client:
            while time.monotonic() < until:
                started = time.monotonic()
                answer = await client.get("/health")
                self.health.append(time.monotonic() - started)
                assert answer.status_code == 200
                self.memory = max(self.memory, sum(rss_by_process(self.url).values()))
                await asyncio.sleep(0.1)


async def phase(url: str, seconds: float) -> tuple[Guest, Watch]:
    """So many seconds of the guest, watched."""
    until = time.monotonic() + seconds
    guest, watch = Guest(url), Watch(url)
    await asyncio.gather(guest.live(until), watch.live(until))
    return guest, watch


async def in_turns(url: str, seconds: float, attackers: ProcessPoolExecutor) -> list[str]:
    """Each attack for its part of the time, and a third as long without one before it -> what did not hold."""
    wrong: list[str] = []
    quiet_times: list[float] = []
    part = seconds / len(ATTACKS)
    await phase(url, 1.0)  # warm
    for name in (attack.__name__ for attack in ATTACKS):
        quiet, _ = await phase(url, part * 0.25)
        quiet_times += quiet.times
        attack = asyncio.get_running_loop().run_in_executor(attackers, run_attack, name, url, part * 0.75)
        guest, watch = await phase(url, part * 0.75)
        statuses, before = await attack, float(np.percentile(quiet_times, 99))
        medians = f"{1e3 * np.median(quiet_times):.0f} -> {1e3 * np.median(guest.times):.0f} ms"
        print(
            f"{name}: p50 {medians}, p99 {1e3 * before:.0f} -> {1e3 * guest.p99:.0f} ms ({len(guest.times)} answers), "
            f"health {1e3 * max(watch.health):.0f} ms, memory {watch.memory / 2**20:.0f} MiB, "
            f"statuses {sorted(statuses)}"
        )
        if guest.p99 > SLOWDOWN_MAX * before:
            wrong.append(f"{name}: p99 {1e3 * before:.0f} -> {1e3 * guest.p99:.0f} ms")
        if max(watch.health) > HEALTH_MAX_S:
            wrong.append(f"{name}: /health took {1e3 * max(watch.health):.0f} ms")
        if watch.memory > MEMORY_MAX:
            wrong.append(f"{name}: {watch.memory / 2**20:.0f} MiB")
        if any(status >= 500 and status != 503 for status in statuses):
            wrong.append(f"{name}: {statuses}")
    return wrong


def run_attacks(seconds: float) -> list[str]:
    flags = ("--num-pages", "1000", "--max-model-len", "1024", "--api-key", "good", "--api-key", "bad",
             "--admin-api-key", "root", "--header-timeout", "2", "--body-timeout", "2",
             "--max-connections-per-client", "300")  # fmt: skip
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawning) as attackers, running_server(*flags) as url:
        wrong = asyncio.run(in_turns(url, seconds, attackers))
        check_nothing_is_left(url)
    return wrong


@pytest.mark.hostile
@pytest.mark.timeout(SECONDS + 400)
def test_attacks_in_turns_cost_a_client_little():
    wrong = run_attacks(SECONDS)
    assert not wrong, wrong


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_a_short_round_of_attacks_leaves_nothing():
    """Too short for percentiles, and the machine may be busy: what counts is memory, statuses and what is left."""
    wrong = [line for line in run_attacks(18.0) if "p99" not in line and "/health" not in line]
    assert not wrong, wrong
