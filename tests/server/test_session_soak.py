"""200 sessions for a quarter of an hour, on memory for a tenth of them, and two kills of the server."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

import httpx
import pytest

from freehold.server.child import free_port

SECONDS = 900
SESSIONS = 200
WORKERS = 24
KILLS_AT = (300, 600)
PAGES, LIMIT = 240, 512
FLAGS = (
    "--num-pages", str(PAGES), "--max-model-len", str(LIMIT), "--forward-retract-interval", "7",
    "--audit-interval", "5", "--max-running-requests", "8",
)  # fmt: skip


class KilledServer:
    """A server that can be killed and started again, on the same port and with the same sessions."""

    def __init__(self, store: str):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.is_up = asyncio.Event()
        self._store = store

    async def start(self) -> None:
        command = [sys.executable, "-m", "freehold.cli", "serve", "--port", str(self.port), *FLAGS]
        self._process = subprocess.Popen([*command, "--session-store", self._store], start_new_session=True)
        async with httpx.AsyncClient(base_url=self.url, timeout=5) as client:
            while True:
                assert self._process.poll() is None, "the server ended"
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("/health")).status_code == 200:
                        break
                await asyncio.sleep(0.2)
        self.is_up.set()

    async def kill(self) -> None:
        self.is_up.clear()
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGTERM)
        self._process.wait(60)


@dataclass
class Known:
    """What the client knows of a session. `maybe` is what it may have become when the answer got lost."""

    name: str
    tokens: list[int] = field(default_factory=list)
    maybe: list[int] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Soak:
    def __init__(self, server: KilledServer, client: httpx.AsyncClient, until: float):
        self.server = server
        self.client = client
        self.until = until
        self.known = [Known(f"s{i}") for i in range(SESSIONS)]
        self.tally: dict[str, int] = {}

    def count(self, what: str) -> None:
        self.tally[what] = self.tally.get(what, 0) + 1

    async def post(self, path: str, body: dict, status: int = 200):
        answer = await self.client.post(path, json=body)
        assert answer.status_code == status, f"{path} {body}: {answer.status_code} {answer.text}"
        return answer.json()

    async def worker(self, number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < self.until:
            await self.server.is_up.wait()
            known = rng.choice(self.known)
            if known.lock.locked():
                await asyncio.sleep(0.01)
                continue
            async with known.lock:
                try:
                    await self.something(rng, known)
                except (httpx.TransportError, httpx.StreamError):
                    if self.server.is_up.is_set():
                        raise
                    self.count("cut off by a kill")

    async def something(self, rng: random.Random, known: Known) -> None:
        await self.check_history(known)
        kind = rng.choice(["turn"] * 8 + ["abort", "disconnect", "too long", "second", "rewind", "cold"])
        new = [rng.randrange(1000, 40000) for _ in range(rng.choice([1, 5, 12, 30]))]
        if len(known.tokens) + len(new) + 20 > LIMIT:
            await self.post(f"/v1/sessions/{known.name}/rewind", {"to": 24})
            known.tokens = known.tokens[:24]
        body = {
            "prompt": new, "session_id": known.name, "max_tokens": rng.choice([1, 3, 9]), "temperature": 0,
            "retention": rng.choice([None, None, {"next": "resume", "ttl": 5}, {"next": "done"}]),
        }  # fmt: skip
        if kind == "too long":
            await self.post("/v1/completions", {**body, "prompt": [7] * (LIMIT + 1 - len(known.tokens))}, 400)
        elif kind in ("abort", "disconnect"):
            known.maybe = new
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.client.post("/v1/completions", json=body), rng.random() * 0.3)
            await self.settle(known, new)
        elif kind == "second":
            known.maybe = new
            first = asyncio.create_task(self.client.post("/v1/completions", json=body))
            await asyncio.sleep(0.01)
            second = await self.client.post("/v1/completions", json=body)
            assert second.status_code in (200, 409), second.text
            assert (await first).status_code in (200, 409)
            await self.settle(known, None)
        elif kind == "rewind":
            to = rng.randint(0, len(known.tokens))
            await self.post(f"/v1/sessions/{known.name}/rewind", {"to": to})
            known.tokens = known.tokens[:to]
        elif kind == "cold" and known.tokens:
            await self.compare_with_a_cold_run(known, new, body)
        else:
            await self.turn(known, new, body)
        self.count(kind)

    async def history(self, known: Known) -> list[int]:
        answer = await self.client.get(f"/v1/sessions/{known.name}", params={"token_ids": True})
        assert answer.status_code == 200, answer.text
        assert not answer.json()["active"] or known.maybe is not None
        return answer.json()["token_ids"]

    async def check_history(self, known: Known) -> None:
        """It is what it was, or has the turn whose answer got lost."""
        if known.maybe is not None:
            await self.settle(known, known.maybe)
        assert await self.history(known) == known.tokens, f"{known.name} has changed by itself"

    async def settle(self, known: Known, new: list[int] | None) -> None:
        """A turn was abandoned: wait until it is over, and see whether it had been in time."""
        end = time.monotonic() + 30
        while True:
            card = (await self.client.get(f"/v1/sessions/{known.name}", params={"token_ids": True})).json()
            if not card["active"]:
                break
            assert time.monotonic() < end, f"{known.name}: a turn does not end"
            await asyncio.sleep(0.02)
        now = card["token_ids"]
        assert now[: len(known.tokens)] == known.tokens
        if new is not None and now != known.tokens:
            assert now[len(known.tokens) :][: len(new)] == new
        known.tokens, known.maybe = now, None

    async def turn(self, known: Known, new: list[int], body: dict) -> list[int]:
        known.maybe = new
        answer = await self.post("/v1/completions", body)
        assert answer["usage"]["prompt_tokens"] == len(known.tokens) + len(new)
        now = await self.history(known)
        output = now[len(known.tokens) + len(new) :]
        assert now == [*known.tokens, *new, *output]
        assert len(output) == answer["usage"]["completion_tokens"]
        known.tokens, known.maybe = now, None
        return output

    async def compare_with_a_cold_run(self, known: Known, new: list[int], body: dict) -> None:
        whole = [*known.tokens, *new]
        output = await self.turn(known, new, body)
        params = {"temperature": 0, "max_new_tokens": body["max_tokens"]}
        cold = await self.post(
            "/generate", {"input_ids": whole, "sampling_params": params, "cache_salt": f"cold {random.random()}"}
        )
        assert cold["output_ids"] == output, f"{known.name}: differs from a cold run"

    async def kills(self) -> None:
        started = time.monotonic()
        for at in KILLS_AT:
            await asyncio.sleep(started + at - time.monotonic())
            await self.server.kill()
            await asyncio.sleep(1)
            await self.server.start()


async def soak(store: str) -> dict[str, int]:
    server = KilledServer(store)
    await server.start()
    limits = httpx.Limits(max_connections=2 * WORKERS + 4, max_keepalive_connections=0)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            run = Soak(server, client, time.monotonic() + SECONDS)
            for known in run.known:
                await run.post("/v1/sessions", {"session_id": known.name})
            workers = [asyncio.create_task(run.worker(i)) for i in range(WORKERS)]
            await asyncio.gather(run.kills(), *workers)
            for known in run.known:
                await run.check_history(known)
            assert (await client.get("/health")).status_code == 200
            memory = (await client.get("/debug/memory")).json()
            assert memory["leases"] == []
            for known in run.known:
                assert (await client.delete(f"/v1/sessions/{known.name}")).json()["deleted"]
            await client.post("/flush_cache", params={"timeout": 10})
            pages = (await client.get("/debug/memory")).json()["pages"]
            assert pages["free"] == pages["capacity"] == PAGES, pages
            return run.tally
    finally:
        server.stop()


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
def test_sessions_survive_a_quarter_of_an_hour_of_everything(tmp_path):
    tally = asyncio.run(soak(str(tmp_path / "sessions.db")))
    print(tally)
    assert all(tally[kind] > 20 for kind in ("turn", "abort", "disconnect", "too long", "second", "rewind", "cold"))
    assert tally["turn"] > 1000
