"""What a hostile client with a key of its own, or with none, does to a server. Each attack goes on until a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import Awaitable, Callable

import httpx

Attack = Callable[["Attacker", float], Awaitable[None]]
FAILURES = (httpx.HTTPError, OSError)


class Attacker:
    """`answers` are the statuses that it got."""

    def __init__(self, url: str, key: str):
        self.url = url
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self.answers: set[int] = set()

    async def post(self, client: httpx.AsyncClient, path: str, body: dict | bytes, **options) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        options = {"headers": self.headers, "timeout": 30.0, **options}
        with contextlib.suppress(*FAILURES):
            answer = await client.post(self.url + path, content=content, **options)
            self.answers.add(answer.status_code)

    async def raw(self, head: str, piece: bytes, pieces: int, pause: float = 0.0) -> None:
        """Send a request piece by piece for as long as the server takes it."""
        with contextlib.suppress(*FAILURES):
            reader, writer = await asyncio.open_connection(self.host, self.port)
            try:
                writer.write(head.encode())
                for _ in range(pieces):
                    writer.write(piece)
                    await writer.drain()
                    if reader.at_eof():
                        break
                    await asyncio.sleep(pause)
                with contextlib.suppress(TimeoutError):
                    line = await asyncio.wait_for(reader.readline(), 5.0)
                    if line:
                        self.answers.add(int(line.split()[1]))
            finally:
                writer.close()

    def head(self, length: int, key: str | None = None) -> str:
        key = self.headers["Authorization"] if key is None else f"Bearer {key}"
        lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", f"Authorization: {key}",
                 f"Content-Length: {length}", "", "")  # fmt: skip
        return "\r\n".join(lines)


async def large_bodies(attacker: Attacker, until: float) -> None:
    """A hundred megabytes, eight at a time, with a wrong key and with a right one, with a length and without."""
    piece = b"a " * 32768
    chunk = b"10000\r\n" + piece + b"\r\n"
    chunked = attacker.head(0).replace("Content-Length: 0", "Transfer-Encoding: chunked")
    while time.monotonic() < until:
        heads = [(attacker.head(100_000_000, key), piece) for key in ("wrong", None)] + [(chunked, chunk)]
        await asyncio.gather(*(attacker.raw(head, data, 1600) for head, data in heads * 3))
        await asyncio.sleep(0.05)


async def long_prompts(attacker: Attacker, until: float) -> None:
    """As much text as a body may have, and prompts that just fit into the context."""
    async with httpx.AsyncClient() as client:
        while time.monotonic() < until:
            await attacker.post(client, "/v1/completions", {"prompt": "a " * 1_900_000, "max_tokens": 1})
            prompt = [random.randrange(100, 9000) for _ in range(900)]
            await attacker.post(client, "/v1/completions", {"prompt": prompt, "max_tokens": 1})


async def half_open_connections(attacker: Attacker, until: float) -> None:
    """Two hundred connections that never send a request, or only its beginning."""
    while time.monotonic() < until:
        held = []
        for number in range(200):
            with contextlib.suppress(*FAILURES):
                _, writer = await asyncio.open_connection(attacker.host, attacker.port)
                if number % 2:
                    writer.write(b"POST /v1/completions HT")
                held.append(writer)
        await asyncio.sleep(min(1.0, max(until - time.monotonic(), 0)))
        for writer in held:
            writer.close()


async def slow_bodies(attacker: Attacker, until: float) -> None:
    """A byte at a time."""
    while time.monotonic() < until:
        head = attacker.head(100_000)
        await asyncio.gather(*(attacker.raw(head, b" ", 20, pause=0.1) for _ in range(50)))


async def floods(attacker: Attacker, until: float) -> None:
    """128 outputs of 400 tokens, and 256 prompts at once."""
    async with httpx.AsyncClient() as client:
        while time.monotonic() < until:
            left = max(until - time.monotonic(), 0.1)
            many = {"prompt": "Once upon a time", "n": 128, "max_tokens": 400, "ignore_eos": True}
            lists = {"prompt": [[number + 100] * 20 for number in range(256)], "max_tokens": 2}
            await asyncio.gather(*(
                attacker.post(client, "/v1/completions", body, timeout=left) for body in (many, lists)
            ))  # fmt: skip


ODD = [
    b'{"prompt": "\\ud83d"}',
    b"[" * 100_000,
    b"\x00\xff",
    b'{"prompt": {}}',
    b'{"prompt": [99999999]}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "max_tokens": 1e999}',
    b'{"prompt": "a", "n": -1}',
    b'{"prompt": "a", "lora_path": "x"}',
    b'{"prompt": "a", "logit_bias": {"1": "x"}}',
]


async def odd_input(attacker: Attacker, until: float) -> None:
    """Halves of characters, nesting without end, numbers that are none, types that are wrong."""
    async with httpx.AsyncClient() as client:
        while time.monotonic() < until:
            for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/v1/messages", "/v1/sessions"):
                await attacker.post(client, path, random.choice(ODD))
                await asyncio.sleep(0.01)


async def foreign_names(attacker: Attacker, until: float) -> None:
    """Ends whatever it can name, and looks for what others have."""
    async with httpx.AsyncClient() as client:
        while time.monotonic() < until:
            for path, body in (
                ("/abort_request", {"rid": ""}), ("/abort_request", {"abort_all": True}), ("/flush_cache", {}),
                ("/v1/sessions", {"session_id": "good"}), ("/close_session", {"session_id": "good"}),
                ("/pause_generation", {"mode": "abort"}), ("/debug/miss", {"prompt": "a"}),
            ):  # fmt: skip
                await attacker.post(client, path, body)
                await asyncio.sleep(0.01)


async def expressions(attacker: Attacker, until: float) -> None:
    """Patterns that make others backtrack, and stop strings of every kind."""
    patterns = [r"(a|aa)+$b", r"(.*)(.*)(.*)x", r"(\w+\s?)+!", r"([a-z]+)*\d"]
    async with httpx.AsyncClient() as client:
        while time.monotonic() < until:
            body = {"prompt": "aaaa aaaa", "max_tokens": 20, "ignore_eos": True}
            await attacker.post(client, "/v1/completions", {**body, "stop_regex": patterns})
            await attacker.post(client, "/v1/completions", {**body, "stop": ["e" * 2000, "\u00e9" * 50, " the"]})
            await attacker.post(client, "/v1/completions", {**body, "logprobs": 5, "echo": True})


async def leaving(attacker: Attacker, until: float) -> None:
    """Asks for much, and goes."""
    async with httpx.AsyncClient() as client:
        body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
        while time.monotonic() < until:
            tasks = [
                attacker.post(client, "/v1/completions", {**body, "stream": stream}, timeout=random.random() * 0.3)
                for stream in (True, False)
            ]
            await asyncio.gather(*tasks)


ATTACKS: list[Attack] = [
    large_bodies, long_prompts, half_open_connections, slow_bodies, floods, odd_input, foreign_names, expressions,
    leaving,
]  # fmt: skip


def run_attack(name: str, url: str, seconds: float) -> set[int]:
    """In a process of its own, and of low priority: it stands for a machine of its own -> the statuses it got."""
    os.nice(10)
    attacker = Attacker(url, "bad")
    attack = next(attack for attack in ATTACKS if attack.__name__ == name)
    asyncio.run(attack(attacker, time.monotonic() + seconds))
    return attacker.answers
