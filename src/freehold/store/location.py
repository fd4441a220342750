"""Where entries are kept: a folder, Redis, or a bucket, as one writes it on a command line."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from freehold.store.disk import DiskStore
from freehold.store.store import Store

GIB = 1 << 30


def open_store(location: str, capacity_bytes: int = 64 * GIB, is_read_only: bool = False) -> Store:
    """A folder's path, `redis://host:port/0`, `s3://bucket/prefix`. The libraries for the last two are optional. Raises
    ValueError, StoreUnavailable, ImportError."""
    url = urlsplit(location)
    match url.scheme:
        case "" | "file":
            return DiskStore(Path(url.path if url.scheme else location), capacity_bytes, is_read_only=is_read_only)
        case "redis" | "rediss" | "unix":
            from freehold.store.redis_store import RedisStore

            return RedisStore(location, capacity_bytes)
        case "s3":
            from freehold.store.object_store import ObjectStore

            return ObjectStore(url.netloc, url.path.strip("/"))
        case other:
            raise ValueError(f"{location}: '{other}' is not a kind of store: name a folder, redis://... or s3://...")
