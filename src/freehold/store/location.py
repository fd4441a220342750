"""Where entries are kept: a folder, Redis, or a bucket, as written on a command line."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from freehold.store.disk import DiskStore
from freehold.store.store import Store

GIB = 1 << 30
KINDS = {"": "file", "file": "file", "redis": "redis", "rediss": "redis", "unix": "redis", "s3": "s3"}  # by scheme


def kind_of(location: str) -> str | None:
    """Return file, redis or s3, or None for any other location."""
    return KINDS.get(urlsplit(location).scheme) if location else None


def open_store(location: str, capacity_bytes: int = 64 * GIB, is_read_only: bool = False) -> Store:
    """Open a folder's path, `redis://host:port/0` or `s3://bucket/prefix`. The libraries for the last two are optional.
    Raise ValueError, StoreUnavailable or ImportError."""
    url = urlsplit(location)
    match kind_of(location):
        case "file":
            return DiskStore(Path(url.path if url.scheme else location), capacity_bytes, is_read_only=is_read_only)
        case "redis":
            from freehold.store.redis_store import RedisStore

            return RedisStore(location, capacity_bytes)
        case "s3":
            from freehold.store.object_store import PREFIX, ObjectStore

            return ObjectStore(url.netloc, url.path.strip("/") or PREFIX)
        case _:
            raise ValueError(
                f"{location}: '{url.scheme}' is not a kind of store: name a folder, redis://... or s3://..."
            )
