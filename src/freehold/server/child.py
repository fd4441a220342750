"""A server as a child process, for demos, benchmarks and tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx

START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 40


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_server(*flags: str) -> Iterator[str]:
    """Run `freehold serve` with `flags` as a child process. Yield its URL once healthy, then end it with SIGTERM.

    Raises RuntimeError if it does not start or stop.
    """
    port = free_port()
    command = [sys.executable, "-m", "freehold", "serve", "--port", str(port), *flags]
    # In its own process group, so that a terminal's Ctrl-C does not reach it besides our SIGTERM.
    process = subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(process, url)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RuntimeError(f"the server did not stop within {STOP_TIMEOUT_S} s") from None


def wait_until_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until /health answers 200. Raises RuntimeError if the process ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(timeout=5) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with code {process.returncode} before it was ready")
            with contextlib.suppress(httpx.HTTPError):
                if client.get(f"{url}/health").status_code == 200:
                    return
            time.sleep(0.1)
    raise RuntimeError(f"the server was not ready within {START_TIMEOUT_S} s")
