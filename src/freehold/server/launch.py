"""Running a server: in this process, or as a child for demos, benchmarks and tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from freehold.config import EngineConfig
from freehold.ipc.async_engine import AsyncEngine
from freehold.models.loading.resolve import resolve_model
from freehold.server.app import Server, create_app
from freehold.server.config import ServerConfig
from freehold.server.served_models import ServedModels

START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 40


def run_server(config: EngineConfig, http: ServerConfig, sources: Mapping[str, str]) -> int:
    """Serve until told to stop -> the exit code. `sources` says where options came from. Raises ValueError for options
    that can't be."""
    _check_address(http)
    engine = AsyncEngine(max_restarts=http.max_restarts, **vars(config))
    # Fetched here, where the progress bar can be seen, and before anything listens.
    path = resolve_model(config.model)
    models = ServedModels(http.served_model_name or (served_name(path),), http.allow_any_model)
    print(f"Freehold serves {models.first} on {http.address} (loading ...)", file=sys.stderr, flush=True)
    app = create_app(engine, models, http, sources)
    server = Server(engine, app, http)
    server.run()
    return 1 if engine.failure else 0


def _check_address(http: ServerConfig) -> None:
    """Raises ValueError if nobody can listen there."""
    for name, file in (("ssl_keyfile", http.ssl_keyfile), ("ssl_certfile", http.ssl_certfile)):
        if file is not None and not Path(file).is_file():
            raise ValueError(f"{name}: there is no file {file}")
    if http.uds is not None:
        if not Path(http.uds).absolute().parent.is_dir():
            raise ValueError(f"uds: there is no folder for the socket {http.uds}")
        return
    host, port = http.host, http.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ValueError(
            f"can't listen on {host}:{port}: {error.strerror}. Choose others with --host and --port"
        ) from None


def served_name(path: Path) -> str:
    """SmolLM2-135M-Instruct.Q4_1.gguf -> SmolLM2-135M-Instruct"""
    if path.is_dir():
        return path.name
    name = path.stem
    head, dot, last = name.rpartition(".")
    return head if dot and last[:1] in "QqFfBb" else name


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_server(*flags: str) -> Iterator[str]:
    """`freehold serve` with `flags` as a child process -> its URL once it is healthy. Ends it with SIGTERM.

    Raises RuntimeError if it does not start or does not stop.
    """
    port = free_port()
    command = [sys.executable, "-m", "freehold.cli", "serve", "--port", str(port), *flags]
    # A process group of its own: Ctrl-C in a terminal should not reach it beside our SIGTERM.
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
    """Until /health answers 200. Raises RuntimeError if the process ends or takes too long."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode} before it was ready")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready within {START_TIMEOUT_S} s")
