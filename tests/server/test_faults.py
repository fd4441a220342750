"""The engine's process dies, or stops without dying; the server is told to end while it works."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import httpx
import pytest

from freehold.server.child import free_port, wait_until_healthy


class Server:
    """`freehold serve` as a child, whose own child can be hurt."""

    def __init__(self, *flags: str, stderr: int | IO[str] | None = subprocess.PIPE, port: int | None = None):
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            sys.executable,
            "-m",
            "freehold",
            "serve",
            "--port",
            str(self.port),
            "--num-pages",
            "200",
            *flags,
        ]
        self.process = subprocess.Popen(command, start_new_session=True, stderr=stderr, text=True)
        wait_until_healthy(self.process, self.url)

    def engine(self) -> int:
        """The id of the engine's process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (found,) = [int(pid) for pid in children if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return found

    def complete(self, **fields) -> httpx.Response:
        body = {"prompt": "Once upon a time", "max_tokens": 4, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def end(self, seconds: float = 30) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@pytest.fixture
def server(request):
    running = Server(*getattr(request, "param", ()))
    try:
        yield running
    finally:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGKILL)


def in_background(call) -> tuple[threading.Thread, list]:
    found: list = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


def status(server: Server) -> int:
    return httpx.get(f"{server.url}/health", timeout=10).status_code


def is_running(server: Server) -> bool:
    """Whether a request is being computed."""
    return bool(re.search(r"^vllm:num_requests_running{.*} 1.0", httpx.get(f"{server.url}/metrics").text, re.MULTILINE))


def test_an_engine_that_is_killed_is_started_again_and_sessions_go_on(server):
    session = httpx.post(f"{server.url}/v1/sessions", json={}).json()["id"]
    assert server.complete(session_id=session).status_code == 200
    thread, found = in_background(lambda: server.complete(max_tokens=500, ignore_eos=True))
    wait_for(lambda: is_running(server))
    os.kill(server.engine(), signal.SIGKILL)
    thread.join(10)
    assert found[0].status_code == 503
    assert "started again" in found[0].json()["error"]["message"]
    assert server.complete().status_code == 503, "while it starts"
    wait_for(lambda: status(server) == 200)
    assert server.complete(session_id=session, prompt=" there was").status_code == 200
    assert httpx.get(f"{server.url}/v1/sessions/{session}").json()["turns"] == 2
    assert server.end() == 0


def test_an_engine_that_dies_while_it_starts_again_is_started_once_more(server):
    first = server.engine()
    os.kill(first, signal.SIGKILL)

    def starting() -> bool:
        try:
            return server.engine() != first
        except ValueError:
            return False

    wait_for(starting)
    os.kill(server.engine(), signal.SIGKILL)
    wait_for(lambda: status(server) == 200)
    assert server.complete().status_code == 200


@pytest.mark.parametrize("server", [("--max-restarts", "0")], indirect=True)
def test_a_server_whose_engine_is_lost_ends_with_a_code(server):
    os.kill(server.engine(), signal.SIGKILL)
    assert server.process.wait(15) == 1


@pytest.mark.parametrize("server", [("--watchdog-timeout", "12")], indirect=True)
def test_an_engine_that_has_stopped_is_not_waited_for(server):
    pid = server.engine()
    thread, found = in_background(lambda: server.complete(max_tokens=500, ignore_eos=True, timeout=3))
    wait_for(lambda: is_running(server))
    os.kill(pid, signal.SIGSTOP)
    before = time.monotonic()
    wait_for(lambda: status(server) == 503, 8)
    answer = httpx.get(f"{server.url}/debug/memory", timeout=10)
    assert (answer.status_code, time.monotonic() - before < 15) == (503, True)
    thread.join(10)
    assert found[0].status_code == 503
    assert "timed out after 3 s" in found[0].json()["error"]["message"]
    wait_for(lambda: status(server) == 200, 40)
    assert server.engine() != pid, "it was ended, and another one started"
    assert server.complete().status_code == 200


@pytest.mark.parametrize("server", [("--watchdog-timeout", "2")], indirect=True)
def test_a_server_that_was_stopped_goes_on(server):
    """As a shell does it with Ctrl-Z and fg."""
    pid = server.engine()
    for one in (server.process.pid, pid):
        os.kill(one, signal.SIGSTOP)
    time.sleep(8)  # longer than the engine may be silent
    server.process.send_signal(signal.SIGCONT)
    time.sleep(0.5)  # the server is first to see what time it is
    os.kill(pid, signal.SIGCONT)
    assert server.complete().status_code == 200
    time.sleep(1.5)  # in which its silence would be noticed
    assert server.engine() == pid


def test_a_stopped_engine_does_not_keep_the_server_alive(server):
    os.kill(server.engine(), signal.SIGSTOP)
    assert server.end(25) in (0, 1)


@pytest.mark.parametrize("server", [("--drain-timeout", "20")], indirect=True)
def test_what_runs_is_finished_and_what_comes_is_refused(server):
    thread, found = in_background(lambda: server.complete(max_tokens=300, ignore_eos=True))
    wait_for(lambda: is_running(server))
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: status(server) == 503)
    assert server.complete().status_code == 503
    assert status(server) == 503
    thread.join(30)
    assert found[0].json()["usage"]["completion_tokens"] == 300
    assert server.process.wait(10) == 0


@pytest.mark.parametrize("server", [("--drain-timeout", "1")], indirect=True)
def test_draining_has_an_end(server):
    thread, found = in_background(lambda: server.complete(max_tokens=3000, ignore_eos=True))
    wait_for(lambda: is_running(server))
    before = time.monotonic()
    assert server.end() == 0
    assert time.monotonic() - before < 12
    thread.join(5)
    assert found[0].status_code == 503


@pytest.mark.parametrize("server", [("--log-requests", "--api-key", "secret")], indirect=True)
def test_a_request_leaves_a_line_without_content(server):
    given = {"Authorization": "Bearer secret", "x-request-id": "abc-1"}
    body = {"prompt": "Nobody may read this", "max_tokens": 3, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=given, timeout=60)
    assert answer.headers["x-request-id"] == "abc-1"
    refused = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-request-id": "x" * 200})
    assert (refused.status_code, len(refused.headers["x-request-id"])) == (401, 32)
    server.end()
    written = server.process.stderr.read()
    lines = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line["request_id"] == "abc-1"]
    assert (line["status"], line["output_tokens"], line["end"], line["route"]) == (200, 3, "length", "/v1/completions")
    assert line["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert 0 < line["first_token_s"] <= line["total_s"]
    assert any(line["status"] == 401 and line["client"] == "" for line in lines)
    assert "Nobody" not in written
    assert "secret" not in written
