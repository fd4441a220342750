"""The processes behind a server's URL, and how much memory they have."""

import psutil


def server_of(url: str) -> psutil.Process:
    port = url.rpartition(":")[2]
    found = (process for process in psutil.process_iter(["cmdline"]) if port in (process.info["cmdline"] or []))
    return next(found)


def engine_of(url: str) -> psutil.Process:
    """The process that computes."""
    children = server_of(url).children()
    return next(child for child in children if "freehold.ipc.engine_process" in child.cmdline())


def rss_by_process(url: str) -> dict[str, int]:
    """Bytes of the server and of its engine."""
    return {"server": server_of(url).memory_info().rss, "engine": engine_of(url).memory_info().rss}
