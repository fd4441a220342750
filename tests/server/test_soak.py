"""Everything at once, for ten minutes: sessions, forks, tiers, hints, adapters, speculation, forced retraction, aborts,
pauses, and killed processes. Sessions are what their clients know, nothing is left, and memory stays flat."""

import asyncio
import contextlib
import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import psutil
import pytest
from completing import complete
from killing import Cut, KilledServer
from leftovers import check_nothing_is_left
from processes import rss_by_process, server_of
from random_adapters import save_random_adapter

SECONDS = float(os.environ.get("FREEHOLD_SOAK_SECONDS", "600"))
# Of the time: the server is warm, the engine is not killed any more, the last engine is warm. From then memory is flat.
SERVER_WARM, KILLING, WARM = 0.15, 0.3, 0.4
ACT_S = min(6.0, SECONDS / 100)  # between two acts of the operator, at most
GROWTH_MAX = 0.02 if SECONDS >= 300 else 0.1  # a short form is hardly warm
SESSIONS, WORKERS, CLIENTS = 60, 12, 8
PAGES, LIMIT, STORED = 120, 400, 200 << 20
TEXT = "one two three four five six seven eight nine ten "
BACKEND = "/hicache/storage-backend"
TURNS = ["turn"] * 6 + ["abort", "too long", "second", "rewind", "cold", "fork", "save", "restore"]
FLAGS = (
    "--num-pages", str(PAGES), "--max-model-len", str(LIMIT), "--max-running-requests", "6", "--max-restarts", "1000",
    "--forward-retract-interval", "7", "--audit-interval", "5", "--speculative-algorithm", "ngram",
    "--enable-hierarchical-cache", "--hicache-ratio", "1.5", "--hicache-storage-backend", "file",
    "--hicache-storage-capacity", str(STORED), "--max-loras", "3",
)  # fmt: skip


@dataclass
class Known:
    """What a client knows of its session. `maybe` says what it may have become as well, when an answer was lost; `last`
    is a turn: what was computed, and the output."""

    name: str
    adapter: str | None
    tokens: list[int] = field(default_factory=list)
    maybe: Callable[[list[int]], bool] | None = None
    last: tuple[list[int], list[int]] = ([], [])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def begins_turn(self, new: list[int]) -> list[int]:
        whole = [*self.tokens, *new]
        self.maybe = lambda now: now[: len(whole)] == whole
        return whole


class Soak:
    def __init__(self, server: KilledServer, until: float):
        self.server = server
        self.until = until
        self.known = [Known(f"s{i}", (None, None, "first", "second")[i % 4]) for i in range(SESSIONS)]
        self.tally: Counter[str] = Counter()
        self._forks = itertools.count()

    # -- sessions -----------------------------------------------------------------------------------------

    async def work(self, number: int) -> None:
        """Turn after turn, in any of the sessions that is not busy."""
        rng = random.Random(number)
        while time.monotonic() < self.until:
            known = rng.choice([known for known in self.known if not known.lock.locked()])
            async with known.lock:
                try:
                    await self.check_history(known)
                    self.tally[await self.something(rng, known)] += 1
                except Cut:
                    self.tally["cut off"] += 1

    async def something(self, rng: random.Random, known: Known) -> str:
        kind = rng.choice(TURNS)
        new = [rng.randrange(1000, 40000) for _ in range(rng.choice([1, 5, 12, 30]))]
        if len(known.tokens) + 2 * len(new) + 20 > LIMIT:
            await self.rewind(known, 24)
        body = {
            "prompt": new, "max_tokens": rng.choice([1, 3, 9]), "temperature": 0, "model": known.adapter,
            "retention": rng.choice([None, None, {"next": "resume", "ttl": 5}, {"next": "done"}, {"priority": 70}]),
        }  # fmt: skip
        session, completions = {"session_id": known.name}, "/v1/completions"
        if kind == "too long":
            await self.server.ask(completions, body | session | {"prompt": [7] * (LIMIT + 1)}, statuses=(400,))
        elif kind == "abort":
            known.begins_turn(new)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.server.ask(completions, body | session), rng.random() * 0.3)
        elif kind == "second":
            known.begins_turn(new)
            waits = {"session_wait": rng.random() < 0.5}
            asks = [self.server.ask(completions, body | session | waits, statuses=(200, 409)) for _ in range(2)]
            await both(*asks)
        elif kind == "rewind":
            await self.rewind(known, rng.randint(0, len(known.tokens)))
        elif kind == "fork":
            await self.fork(known, body)
        elif kind in ("save", "restore"):
            moved = (await self.server.ask(f"/v1/sessions/{known.name}/{kind}")).json()
            assert moved["tokens"] <= len(known.tokens)
        else:
            await self.turn(known, body)
            if kind == "cold":
                await self.compare_with_a_cold_run(known)
        return kind

    async def turn(self, known: Known, body: dict) -> list[int]:
        whole = known.begins_turn(body["prompt"])
        answer = (await self.server.ask("/v1/completions", {**body, "session_id": known.name})).json()
        now = await self.history(known)
        output = now[len(whole) :]
        assert now == [*whole, *output]
        assert answer["usage"]["prompt_tokens"] == len(whole)
        assert answer["usage"]["completion_tokens"] == len(output)
        known.tokens, known.maybe, known.last = now, None, (whole, output)
        return output

    async def rewind(self, known: Known, to: int) -> None:
        left = known.tokens[:to]
        known.maybe = lambda now: now == left
        await self.server.ask(f"/v1/sessions/{known.name}/rewind", {"to": to})
        known.tokens, known.maybe = left, None

    async def fork(self, known: Known, body: dict) -> None:
        """The same turn in both is the same; one of them goes on."""
        old = Known(known.name, known.adapter, known.tokens)
        name = f"f{next(self._forks)}"
        await self.server.ask(f"/v1/sessions/{old.name}/fork", {"session_id": name})
        known.name = name
        one, other = await both(self.turn(old, body), self.turn(known, body))
        assert one == other, f"{old.name} and its fork {name} differ"
        await self.server.ask(f"/v1/sessions/{old.name}", method="DELETE")

    async def history(self, known: Known) -> list[int]:
        """Once no turn runs any more."""
        end = time.monotonic() + 60
        while (card := await self.server.get(f"/v1/sessions/{known.name}", token_ids=True))["active"]:
            assert time.monotonic() < end, f"{known.name}: a turn does not end"
            await asyncio.sleep(0.02)
        return card["token_ids"]

    async def check_history(self, known: Known) -> None:
        """It is what it was, or has the change whose answer was lost."""
        now = await self.history(known)
        assert now == known.tokens or (known.maybe is not None and known.maybe(now)), f"{known.name} changed by itself"
        known.tokens, known.maybe = now, None

    async def compare_with_a_cold_run(self, known: Known) -> None:
        whole, output = known.last
        params = {"temperature": 0, "max_new_tokens": len(output)}
        salt = f"cold {random.random()}"
        body = {"input_ids": whole, "sampling_params": params, "cache_salt": salt, "lora_path": known.adapter}
        cold = (await self.server.ask("/generate", body)).json()
        assert cold["output_ids"] == output, f"{known.name}: differs from a cold run"

    # -- requests without a session -----------------------------------------------------------------------

    async def complete(self, number: int) -> None:
        """Text that repeats, so that drafts are accepted; streams, samples, hints, and clients that leave."""
        rng = random.Random(-number)
        while time.monotonic() < self.until:
            body = {
                "prompt": TEXT * rng.randint(1, 4) + "one two" * rng.randint(0, 1), "max_tokens": rng.randint(1, 48),
                "stream": rng.random() < 0.5, "temperature": rng.choice([0, 0, 0.7]), "ignore_eos": True,
                "prompt_cache_key": rng.choice([None, "numbers"]), "model": rng.choice([None, None, "first"]),
            }  # fmt: skip
            patience = rng.choice([None, None, rng.random() * 4])
            kills = await self.server.opened()
            try:
                await asyncio.wait_for(complete(self.server.client, body), patience)
                self.tally["answered"] += 1
            except TimeoutError:
                self.tally["aborted"] += 1
            except (AssertionError, IndexError, httpx.TransportError):
                if kills == self.server.kills:
                    raise
                self.tally["cut off"] += 1


async def both(*turns):
    """Until both have ended -> their results. Raises what one of them has raised."""
    results = await asyncio.gather(*turns, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Operator:
    """Does one thing after another, and looks whether all is well. In the first part of the time it kills a process
    in the midst of each: what it had set must hold in the next one."""

    def __init__(self, server: KilledServer, kill_until: float, folder: str, adapter: str):
        self.server = server
        self.kill_until = kill_until
        self.storage = {
            "hicache_storage_backend": "file", "hicache_storage_location": folder, "hicache_storage_capacity": STORED
        }  # fmt: skip
        self.adapter = {"lora_name": "third", "lora_path": adapter}
        self.said: set[str] = set()
        self.accepted = 0.0  # drafts of one engine: one that was measured on a busy machine may find that none pay

    async def work(self, until: float) -> None:
        rng = random.Random(0)
        await asyncio.sleep(ACT_S)  # clients have begun
        await self.server.kill_server()
        for act in itertools.cycle([self.pause, self.attach, self.adapt, self.pin, self.flush]):
            await asyncio.sleep(rng.random() * ACT_S)
            if time.monotonic() > until:
                return
            await self.look()
            await act(rng)

    async def kill(self) -> None:
        if time.monotonic() < self.kill_until:
            await self.server.kill_engine()

    async def pause(self, rng: random.Random) -> None:
        await self.server.ask("/pause_generation", {"mode": rng.choice(["retract", "in_place"])})
        await self.kill()
        await asyncio.sleep(0.5)  # of a pause
        await self.server.ask("/continue_generation", {})

    async def attach(self, rng: random.Random) -> None:
        """And detach before."""
        await self.server.ask(BACKEND, method="DELETE")
        await self.kill()
        assert (await self.server.get(BACKEND))["state"] == "detached"
        await self.server.ask(BACKEND, self.storage, "PUT")
        assert (await self.server.get(BACKEND))["state"] == "attached"

    async def adapt(self, rng: random.Random) -> None:
        """An adapter comes, says what it has always said, and goes."""
        await self.server.ask("/v1/load_lora_adapter", self.adapter)
        await self.kill()
        body = {"model": "third", "prompt": TEXT, "max_tokens": 8, "temperature": 0}
        answer = (await self.server.ask("/v1/completions", body)).json()
        self.said.add(answer["choices"][0]["text"])
        assert len(self.said) == 1, self.said
        await self.server.ask("/v1/unload_lora_adapter", {"lora_name": "third"})

    async def pin(self, rng: random.Random) -> None:
        await self.kill()
        pin = (await self.server.ask("/v1/cache/pins", {"prompt": TEXT * 4})).json()
        await asyncio.sleep(0.5)  # of a pin
        await self.server.ask(f"/v1/cache/pins/{pin['id']}", method="DELETE")

    async def flush(self, rng: random.Random) -> None:
        """Device and host forget, once nothing runs."""
        self.server.close()
        try:
            answer = await self.server.client.post("/flush_cache", params={"timeout": 60})
            assert answer.status_code == 200, answer.text
        finally:
            self.server.open()
        await self.kill()

    async def look(self) -> None:
        await self.server.ask("/health", method="GET")
        memory = await self.server.get("/debug/memory")
        for capacity, *owned in (list(memory["pages"].values()), list(memory["tiers"]["host_pages"]["full"].values())):
            assert sum(owned) == capacity, memory
        metrics = await self.server.metrics()
        assert metrics["freehold_unwell"] == 0
        self.accepted = max(self.accepted, metrics["vllm:spec_decode_num_accepted_tokens_total"])


@dataclass
class Watch:
    """How much memory the processes have, as time goes by."""

    url: str
    seen: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    async def live(self, since: float, until: float) -> None:
        await asyncio.sleep(since - time.monotonic())  # its turn to begin
        while time.monotonic() < until:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just been killed
                self.seen.append((time.monotonic(), rss_by_process(self.url)))
            await asyncio.sleep(0.5)

    def growth(self, name: str, early: tuple[float, float], late: tuple[float, float]) -> float:
        """By how much its peak is higher, late."""
        first, second = (
            max(sizes.get(name, 0) for at, sizes in self.seen if since <= at < until) for since, until in (early, late)
        )
        return second / first - 1


async def soak(server: KilledServer, operator: Operator, started: float) -> Watch:
    until = started + SECONDS
    run, watch = Soak(server, until), Watch(server.url)
    async with server.client:
        for known in run.known:
            await server.ask("/v1/sessions", {"session_id": known.name})
        await asyncio.gather(
            watch.live(started + SERVER_WARM * SECONDS, until - 1),
            operator.work(until),
            *(run.work(number) for number in range(WORKERS)),
            *(run.complete(number) for number in range(CLIENTS)),
        )
        for known in run.known:
            await run.check_history(known)
        for known in [known for known in run.known if known.last[1]][:12]:
            await run.compare_with_a_cold_run(known)
        await operator.look()
        print(dict(run.tally), f"{server.engine_kills} kills of the engine, {operator.accepted} drafts accepted")
        assert all(run.tally[kind] > SECONDS / 60 for kind in {*TURNS, "answered", "aborted"})
        assert operator.accepted > SECONDS / 10
        metrics = await server.metrics()
        assert metrics["freehold_engine_restarts_total"] == server.engine_kills > SECONDS / 120
        assert metrics["vllm:num_preemptions_total"] > SECONDS / 6
        moved = (await server.get("/debug/memory"))["tiers"]["moved_pages"]
        assert all(moved.values()), moved
    return watch


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
def test_a_soak(tmp_path):
    adapters = [save_random_adapter(tmp_path / name, seed) for seed, name in enumerate(("first", "second", "third"))]
    server = KilledServer(
        *FLAGS, "--session-store", str(tmp_path / "sessions.db"), "--hicache-storage-location", str(tmp_path / "kv"),
        "--lora-modules", f"first={adapters[0]}", "--lora-modules", f"second={adapters[1]}",
    )  # fmt: skip
    try:
        open_files, started = server_of(server.url).num_fds(), time.monotonic()
        kills_end, warm, middle, end = (started + share * SECONDS for share in (KILLING, WARM, (1 + WARM) / 2, 1))
        operator = Operator(server, kills_end, str(tmp_path / "kv"), adapters[2])
        watch = asyncio.run(soak(server, operator, started))
        growth = {
            "server, since the kills": watch.growth("server", (started, kills_end), (middle, end)),
            "server": watch.growth("server", (warm, middle), (middle, end)),
            "engine": watch.growth("engine", (warm, middle), (middle, end)),
        }
        print(growth)
        check_nothing_is_left(server.url)
        assert server_of(server.url).num_fds() <= open_files + 5
        server.end()
    finally:
        server.destroy()
    verify = [sys.executable, "-m", "freehold", "cache", "verify", str(tmp_path / "kv")]
    assert subprocess.run(verify, check=False).returncode == 0
    assert all(share < GROWTH_MAX for share in growth.values()), growth
