"""The store behind a server's host memory: a folder, Redis or S3, each with the fault that takes all of it away for a
while."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import redis

from store_servers import Server

KINDS = ("file", "redis", "s3")
REDIS_ITSELF = 4 << 20  # bytes


@dataclass
class Behind:
    """`flags`: the server's. `stop` takes the store away, `go_on` brings it back as it was. A store that `is_bounded`
    has the size that was asked for."""

    location: str
    flags: tuple[str, ...]
    stop: Callable[[], None]
    go_on: Callable[[], None]
    is_bounded: bool = True


def put_behind(kind: str, folder: Path, capacity: int, server: Server | None) -> Behind:
    """`server`: the process of Redis or S3. A folder is moved away, as a disk that is no longer mounted; a process
    is stopped, and its connections hang."""
    location, size = {"file": str(folder / "kv"), "s3": "s3://bucket/kv"}.get(kind, ""), ()
    if server is None:
        kept, away = folder / "kv", folder / "away"
        size = ("--hicache-storage-capacity", str(capacity))
        stop, go_on = lambda: kept.rename(away), lambda: away.rename(kept)
    else:
        stop, go_on = lambda: server.signal(signal.SIGSTOP), lambda: server.signal(signal.SIGCONT)
    if kind == "redis":
        location = f"redis://127.0.0.1:{server.port}/0"
        with redis.Redis.from_url(location) as client:
            client.config_set("maxmemory", capacity + REDIS_ITSELF)
            client.config_set("maxmemory-policy", "allkeys-lru")
    flags = ("--hicache-storage-backend", kind, "--hicache-storage-location", location, *size)
    return Behind(location, ("--enable-hierarchical-cache", *flags), stop, go_on, kind != "s3")
