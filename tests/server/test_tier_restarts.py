"""A server with a disk tier is killed at random moments under load: each restart serves, starts warm and is right."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from commands import run
from freehold.server.child import free_port, wait_until_healthy

PROMPTS = [f"Once there was a lighthouse number {number}. " + "The sea was calm and the night was long. " * 12
           for number in range(6)]  # fmt: skip


class Killed:
    """A server that can be killed with all its processes."""

    def __init__(self, folder):
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        flags = [
            "--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--hicache-storage-location",
            str(folder), "--hicache-storage-prefetch-policy", "wait_complete", "--num-pages", "96", "--allow-any-model",
        ]  # fmt: skip
        command = [sys.executable, "-m", "freehold", "serve", "--port", str(port), *flags]
        self._process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until_healthy(self._process, self.url)

    def ask(self, prompt: str, timeout: float = 60) -> tuple[str, dict]:
        body = {"model": "default", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout).raise_for_status().json()
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]

    def post(self, path: str, body: dict) -> dict:
        return httpx.post(f"{self.url}{path}", json=body, timeout=30).raise_for_status().json()

    def kill(self) -> None:
        """All at once, as a power cut would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def load(server: Killed, seconds: float) -> None:
    """Requests from several clients until the server is killed."""
    stop = time.monotonic() + seconds

    def client(number: int) -> None:
        with contextlib.suppress(httpx.HTTPError):
            for turn in range(1000):
                server.ask(PROMPTS[(number + turn) % len(PROMPTS)] + f"Client {number}, turn {turn}.", 5)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for one in clients:
        one.start()
    time.sleep(max(stop - time.monotonic(), 0))  # a random moment
    server.kill()
    for one in clients:
        one.join()


def kill_again_and_again(folder, times: int) -> None:
    rng = random.Random(times)
    server = Killed(folder)
    expected = {prompt: server.ask(prompt)[0] for prompt in PROMPTS}
    time.sleep(1)  # as long as it may take until the last page is stored
    for _ in range(times):
        load(server, rng.uniform(0.05, 1.5))
        code, said = run("cache", "verify", folder)
        assert code == 0, said
        server = Killed(folder)
        stored = 0
        for prompt, text in expected.items():
            answer, tiers = server.ask(prompt)
            assert answer == text
            stored += tiers.get("storage", 0)
        assert stored > 0, "nothing came from storage"
    server.kill()


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_a_server_that_is_killed_starts_warm_and_is_right(tmp_path):
    kill_again_and_again(tmp_path, 2)


@pytest.mark.timeout(200)
def test_a_prompt_can_be_fetched_before_anybody_asks_for_it(tmp_path):
    server = Killed(tmp_path)
    expected = server.ask(PROMPTS[0])
    time.sleep(1)  # as long as it may take until the last page is stored
    server.kill()
    server = Killed(tmp_path)
    try:
        body = {"prompt": PROMPTS[0]}
        assert server.post("/v1/cache/lookup", body)["cached_tokens"] == {"device": 0, "host": 0}
        assert server.post("/v1/cache/prefetch", body)["fetching"]
        deadline = time.monotonic() + 20
        while not (found := server.post("/v1/cache/lookup", body)["cached_tokens"])["host"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        text, tiers = server.ask(PROMPTS[0])
        assert text == expected[0]
        assert tiers["host"] == found["host"]
        assert httpx.get(f"{server.url}/v1/cache", timeout=10).json()["tiers"]["moved_pages"]["fetch"] > 0
        assert 'freehold_moved_pages_total{kind="fetch"' in httpx.get(f"{server.url}/metrics", timeout=10).text
    finally:
        server.kill()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_kills(tmp_path):
    kill_again_and_again(tmp_path, 100)
