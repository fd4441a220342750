"""Faults at random against a real server: every request ends in time, sessions are what their clients know, and nothing
is left."""

import asyncio
import contextlib
import os
import random
import resource
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from leftovers import check_nothing_is_left
from test_faults import Server

SECONDS = float(os.environ.get("FREEHOLD_HOSTILE_SECONDS", "600"))
FAULTS_PER_SECOND = 10_000 / 600
DEADLINE_S = 6.0  # that a request asks for
GRACE_S = 9.0  # in which the server says so: a stopped engine is noticed after 5 s
CLIENTS, CONVERSATIONS = 6, 6
KEY = {"Authorization": "Bearer good"}
HEAD = b"\r\n".join([b"POST %s HTTP/1.1", b"Host: x", b"Authorization: Bearer good", b"Content-Type: application/json",
                    b"Content-Length: %d", b"", b""])  # fmt: skip
BAD = [
    b"", b"{", b"[]", b"null", b'{"prompt": {}}', b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "\\ud83d"}',
]  # fmt: skip


@dataclass
class Storm:
    """What has happened, and what went wrong."""

    server: Server
    until: float
    rng: random.Random
    tally: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until and not self.wrong

    async def ask(self, client: httpx.AsyncClient, path: str, body: dict) -> httpx.Response | None:
        """An answer or an error, in time; None if the connection broke."""
        started = time.monotonic()
        try:
            answer = await client.post(path, json=body, timeout=DEADLINE_S + 2 * GRACE_S)
        except httpx.TimeoutException:
            self.wrong.append(f"{path} was never answered: {body}")
            return None
        except httpx.HTTPError as error:
            self.wrong.append(f"{path}: {error!r}")
            return None
        seconds = time.monotonic() - started
        if seconds > DEADLINE_S + GRACE_S:
            self.wrong.append(f"{path} was answered after {seconds:.1f} s with {answer.status_code}")
        if answer.status_code >= 500 and answer.status_code != 503:
            self.wrong.append(f"{path}: {answer.status_code} {answer.text}")
        self.tally[f"{path} {answer.status_code}"] += 1
        return answer


# -- those who behave -------------------------------------------------------------------------------------


async def client_life(storm: Storm, number: int) -> None:
    rng = random.Random(number)
    async with httpx.AsyncClient(base_url=storm.server.url, headers=KEY) as client:
        while storm.goes_on:
            prompt = [rng.randrange(100, 9000) for _ in range(rng.randint(1, 60))]
            body = {"prompt": prompt, "max_tokens": rng.randint(1, 30), "timeout": DEADLINE_S, "ignore_eos": True}
            await storm.ask(client, "/v1/completions", body)
            await asyncio.sleep(0.05)


class Conversation:
    """A session, and what its client knows of it. A turn that did not answer 200 has not happened; one whose answer
    was not read has happened or not."""

    def __init__(self, storm: Storm, number: int):
        self.storm = storm
        self.name = f"talk-{number}"
        self.rng = random.Random(1000 + number)
        self.tokens: list[int] = []
        self.turns = 0

    async def live(self) -> None:
        storm, rng = self.storm, self.rng
        async with httpx.AsyncClient(base_url=storm.server.url, headers=KEY, timeout=30) as client:
            opened = await client.post("/v1/sessions", json={"session_id": self.name})
            assert opened.status_code == 200, opened.text
            while storm.goes_on:
                prompt = [rng.randrange(100, 9000) for _ in range(rng.randint(1, 20))]
                body = {"prompt": prompt, "max_tokens": rng.randint(1, 12), "timeout": DEADLINE_S, "ignore_eos": True,
                        "session_id": self.name, "session_wait": True}  # fmt: skip
                answered: int | None = 0
                if rng.random() < 0.2:
                    answered = None
                    with contextlib.suppress(httpx.TimeoutException):
                        await client.post("/v1/completions", json=body, timeout=rng.random() * 0.2)
                    storm.tally["turns cut off"] += 1
                else:
                    answer = await storm.ask(client, "/v1/completions", body)
                    if answer is not None and answer.status_code == 200:
                        answered = answer.json()["usage"]["completion_tokens"]
                await self.check(client, prompt, answered)
                if len(self.tokens) > 600:
                    await self.rewind(client)

    async def check(self, client: httpx.AsyncClient, prompt: list[int], answered: int | None) -> None:
        """Compare what is there, as soon as the engine can be asked."""
        card = await self.card(client)
        if card is None:
            return
        tokens, whole = card["token_ids"], [*self.tokens, *prompt]
        happened = tokens[: len(whole)] == whole and card["turns"] == self.turns + 1
        if happened and (answered is None or len(tokens) == len(whole) + answered > len(whole)):
            self.tokens, self.turns = tokens, card["turns"]
        elif answered or tokens != self.tokens or card["turns"] != self.turns:
            self.storm.wrong.append(
                f"{self.name}: {card['turns']} turns, {len(tokens)} tokens; the client knows {self.turns} turns, "
                f"{len(self.tokens)} tokens, sent {len(prompt)} and got {answered}"
            )
        self.storm.tally["turns checked"] += 1

    async def card(self, client: httpx.AsyncClient) -> dict | None:
        for _ in range(600):
            answer = await client.get(f"/v1/sessions/{self.name}", params={"token_ids": True})
            if answer.status_code == 200 and not answer.json()["active"]:
                return answer.json()
            if answer.status_code not in (200, 503):
                self.storm.wrong.append(f"{self.name}: {answer.status_code} {answer.text}")
                return None
            await asyncio.sleep(0.1)
        self.storm.wrong.append(f"{self.name}: nothing was to be heard of it for a minute")
        return None

    async def rewind(self, client: httpx.AsyncClient) -> None:
        answer = await client.post(f"/v1/sessions/{self.name}/rewind", json={"to": 0})
        if answer.status_code == 200:
            self.tokens, self.turns = [], 0
        elif answer.status_code != 503:
            self.storm.wrong.append(f"{self.name}: {answer.status_code} {answer.text}")


# -- faults -----------------------------------------------------------------------------------------------


async def cut(storm: Storm) -> None:
    """A connection that ends somewhere in a request."""
    body = b'{"prompt": "Once upon a time", "max_tokens": 50, "stream": true}'
    whole = HEAD % (b"/v1/completions", len(body)) + body
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", storm.server.port)
        writer.write(whole[: storm.rng.randrange(len(whole) + 1)])
        await asyncio.sleep(storm.rng.random() * 0.1)  # anywhere in the request
        writer.close()


async def slow(storm: Storm) -> None:
    """A body of which nothing comes any more."""
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", storm.server.port)
        writer.write(HEAD % (b"/tokenize", 999) + b"{")
        await asyncio.sleep(3)  # longer than a body may take
        writer.close()


async def bad_body(storm: Storm) -> None:
    await expect(storm, storm.rng.choice(BAD), KEY, {400, 503})


async def wrong_key(storm: Storm) -> None:
    await expect(storm, b'{"prompt": "a"}', {"Authorization": "Bearer wrong"}, {401})


async def expect(storm: Storm, body: bytes, headers: dict, statuses: set[int]) -> None:
    headers = {**headers, "Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=storm.server.url, timeout=30) as client:
        answer = await client.post("/v1/completions", content=body, headers=headers)
        if answer.status_code not in statuses:
            storm.wrong.append(f"{body!r}: {answer.status_code} {answer.text}")


async def leave(storm: Storm) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "n": 4}
    async with httpx.AsyncClient(base_url=storm.server.url, headers=KEY) as client:
        with contextlib.suppress(httpx.TimeoutException):
            await client.post("/v1/completions", json=body, timeout=storm.rng.random() * 0.3)


SMALL = {cut: 30, slow: 5, bad_body: 30, wrong_key: 25, leave: 10}  # and how often of a hundred


async def small_faults(storm: Storm) -> None:
    kinds, weights = list(SMALL), list(SMALL.values())
    running: set[asyncio.Task] = set()
    started, count = time.monotonic(), 0
    while storm.goes_on:
        fault = storm.rng.choices(kinds, weights)[0]
        task = asyncio.create_task(fault(storm))
        running.add(task)
        task.add_done_callback(running.discard)
        storm.tally[fault.__name__] += 1
        count += 1
        await asyncio.sleep(max(started + count / FAULTS_PER_SECOND - time.monotonic(), 0))
    for error in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(error, BaseException):
            storm.wrong.append(repr(error))


def engine_of(storm: Storm) -> int | None:
    try:
        return storm.server.engine()
    except (ValueError, OSError):
        return None  # it is being started


async def large_faults(storm: Storm) -> None:
    """The engine is killed, or stops for a while; the disk is full for a while."""
    while storm.goes_on:
        await asyncio.sleep(storm.rng.uniform(2.0, 6.0))
        fault, pid = storm.rng.choice(["kill", "stop", "stop", "disk", "disk"]), engine_of(storm)
        if fault == "disk":
            full_disk(storm, True)
            await asyncio.sleep(storm.rng.uniform(0.2, 2.0))
            full_disk(storm, False)
        elif pid is not None:
            with contextlib.suppress(ProcessLookupError):
                if fault == "kill":
                    os.kill(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGSTOP)
                    await asyncio.sleep(storm.rng.choice([0.2, 1.0, 7.0]))
                    os.kill(pid, signal.SIGCONT)
        storm.tally[fault] += 1


def full_disk(storm: Storm, is_full: bool) -> None:
    """No file of the server may grow beyond a size that its session store has already."""
    limit = 4096 if is_full else resource.RLIM_INFINITY
    resource.prlimit(storm.server.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


async def watch(storm: Storm) -> None:
    while storm.goes_on:
        await asyncio.sleep(min(5.0, SECONDS / 10))
        status = Path(f"/proc/{storm.server.process.pid}/status").read_text()
        storm.memory.append(int(status.split("VmRSS:")[1].split()[0]) << 10)


async def rage(server: Server, seconds: float) -> Storm:
    storm = Storm(server, time.monotonic() + seconds, random.Random(5))
    conversations = [Conversation(storm, number) for number in range(CONVERSATIONS)]
    lives = [conversation.live() for conversation in conversations]
    lives += [client_life(storm, number) for number in range(CLIENTS)]
    await asyncio.gather(*lives, small_faults(storm), large_faults(storm), watch(storm))
    full_disk(storm, False)
    if (pid := engine_of(storm)) is not None:
        os.kill(pid, signal.SIGCONT)
    return storm


def weather(seconds: float, folder: Path) -> Storm:
    flags = ("--api-key", "good", "--admin-api-key", "root", "--session-store", str(folder / "sessions"),
             "--max-restarts", "1000", "--body-timeout", "2", "--header-timeout", "2",
             "--watchdog-timeout", "6")  # fmt: skip
    with open(folder / "log", "w") as log:
        server = Server(*flags, stderr=log)
    try:
        storm = asyncio.run(rage(server, seconds))
        print(dict(storm.tally), f"server {[size >> 20 for size in storm.memory]} MiB")
        assert not storm.wrong, f"{storm.wrong}\n{(folder / 'log').read_text()[-5000:]}"
        check_nothing_is_left(server.url)
        assert server.end() == 0
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
    return storm


@pytest.mark.hostile
@pytest.mark.timeout(SECONDS + 300)
def test_ten_thousand_faults(tmp_path):
    storm = weather(SECONDS, tmp_path)
    assert sum(storm.tally[fault.__name__] for fault in SMALL) >= 0.95 * SECONDS * FAULTS_PER_SECOND
    count = len(storm.memory)
    assert max(storm.memory[count // 2 :]) <= 1.05 * max(storm.memory[count // 4 : count // 2]), storm.memory


@pytest.mark.thorough
@pytest.mark.timeout(150)
def test_a_few_hundred_faults(tmp_path):
    storm = weather(20.0, tmp_path)
    assert storm.tally["turns checked"] > 10
