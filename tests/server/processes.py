"""The processes behind a server's URL, and how much memory they have."""

import contextlib
import time

import httpx
import psutil


def server_of(url: str) -> psutil.Process:
    port = url.rpartition(":")[2]
    found = (process for process in psutil.process_iter(["cmdline"]) if port in (process.info["cmdline"] or []))
    return next(found)


def engine_of(url: str) -> psutil.Process | None:
    """The process that computes; None while there is none."""
    for child in server_of(url).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            if "freehold.ipc.engine_process" in child.cmdline():
                return child
    return None


def restart_engine(url: str) -> None:
    """Kill the engine, and wait until the next one serves."""
    before, end = engine_of(url), time.monotonic() + 60
    assert before is not None
    before.kill()
    while httpx.get(f"{url}/health").status_code != 200 or engine_of(url) in (None, before):
        assert time.monotonic() < end
        time.sleep(0.2)


def rss_by_process(url: str) -> dict[str, int]:
    """Bytes of the server and of its engine."""
    found = {"server": server_of(url), "engine": engine_of(url)}
    return {name: process.memory_info().rss for name, process in found.items() if process is not None}
