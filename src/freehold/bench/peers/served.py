"""A running engine that can be frozen while another is measured."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from freehold.bench.peers.peer import Model, Peer
from freehold.server.child import free_port, wait_until_healthy

STOP_TIMEOUT_S = 30


class Served:
    """The processes of one engine. While frozen, its idle threads can't spin on another's cores."""

    def __init__(self, peer: Peer, model: Model, tokens: int, log: Path):
        self.peer = peer
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with log.open("w") as output:
            self._process = subprocess.Popen(
                peer.command(peer.python, model, port, tokens),
                env={**os.environ, "HF_HUB_OFFLINE": "1", **peer.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until_healthy(self._process, self.url)
        except RuntimeError as error:
            self.close()
            raise RuntimeError(f"{peer.name}: {error}; its output is in {log}") from None

    def _family(self) -> list[psutil.Process]:
        try:
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.freeze()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def peak_memory(self) -> int:
        """Return the peak resident bytes since the start, summed over its processes."""
        return sum(_peak_memory(process.pid) for process in self._family())

    def cpu_seconds(self) -> float:
        total = 0.0
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def close(self) -> None:
        """End all processes, gently at first."""
        family = self._family()
        self._signal(signal.SIGCONT)
        self._process.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()


def _peak_memory(pid: int) -> int:
    """Return the peak resident bytes. Linux only: 0 elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
