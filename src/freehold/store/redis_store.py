"""Entries in Redis or Valkey: shared by servers, and gone after a time without use."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from freehold.prefix_keys import KEY_BYTES
from freehold.store.entry import Damaged, decode, encode
from freehold.store.store import Item, StoreStats, StoreUnavailable

PREFIX = b"freehold:"
OURS = PREFIX + b"?" * KEY_BYTES  # the pattern of keys of entries
TTL_S = 24 * 3600
AT_ONCE = 32  # commands in one pipeline
CAPACITY_CHECK_S = 1.0


class RedisStore:
    """One value an entry, of the same bytes as on disk. Reading one starts its time anew.

    Redis frees memory by its own rules (`maxmemory-policy`); beyond `capacity_bytes` of used memory nothing more is
    written. `timeout`: seconds that a connection may be silent, so the least that a deadline can mean.
    """

    def __init__(self, url: str, capacity_bytes: int, ttl_seconds: int = TTL_S, timeout: float = 1.0):
        self._capacity, self._ttl = capacity_bytes, ttl_seconds
        self._client: Any = redis.Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0)
        )
        self._damaged = self._dropped = 0
        self._used_bytes, self._checked_at = 0, float("-inf")

    def check(self, deadline: float) -> None:
        try:
            self._client.exists(PREFIX)
        except (redis.AuthenticationError, redis.ResponseError) as error:
            raise ValueError(f"redis: {error}") from error
        except redis.RedisError as error:
            raise StoreUnavailable(f"redis: {error}") from error

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return [bool(found) for found in self._each("exists", keys, deadline)]

    def get(self, keys: Sequence[bytes], deadline: float) -> list[memoryview | None]:
        values = self._each("getex", keys, deadline, ex=self._ttl)
        return [self._decoded(key, raw) for key, raw in zip(keys, values, strict=True)]

    def _decoded(self, key: bytes, raw: bytes | None) -> memoryview | None:
        if raw is None:
            return None
        try:
            return decode(key, raw)
        except Damaged:
            self._damaged += 1
            return None

    def put(self, items: Sequence[Item], deadline: float) -> int:
        end, stored = time.monotonic() + deadline, 0
        if self._is_full():
            self._dropped += len(items)
            return 0
        for start in range(0, len(items), AT_ONCE):
            pipeline = self._client.pipeline(transaction=False)
            for item in items[start : start + AT_ONCE]:
                pipeline.set(PREFIX + item.key, b"".join(encode(*item)), ex=self._ttl)
            stored += sum(answer is True for answer in self._run(pipeline, end, raise_on_error=False))
        self._dropped += len(items) - stored  # Redis was out of memory
        return stored

    def _is_full(self) -> bool:
        if time.monotonic() - self._checked_at > CAPACITY_CHECK_S:
            try:
                self._used_bytes = int(self._client.info("memory")["used_memory"])
            except redis.RedisError as error:
                raise StoreUnavailable(f"redis: {error}") from error
            self._checked_at = time.monotonic()
        return self._used_bytes >= self._capacity

    def _each(self, command: str, keys: Sequence[bytes], deadline: float, **options: int) -> list[Any]:
        """One answer for each key."""
        end, answers = time.monotonic() + deadline, []
        for start in range(0, len(keys), AT_ONCE):
            pipeline = self._client.pipeline(transaction=False)
            for key in keys[start : start + AT_ONCE]:
                getattr(pipeline, command)(PREFIX + key, **options)
            answers += self._run(pipeline, end)
        return answers

    def _run(self, pipeline: Any, end: float, raise_on_error: bool = True) -> list[Any]:
        if time.monotonic() > end:
            raise StoreUnavailable("redis: the deadline has passed")
        try:
            return pipeline.execute(raise_on_error=raise_on_error)
        except redis.RedisError as error:
            raise StoreUnavailable(f"redis: {error}") from error

    def clear(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        try:
            for keys in _chunks(self._ours()):
                if time.monotonic() > end:
                    raise StoreUnavailable("redis: the deadline has passed")
                self._client.unlink(*keys)
        except redis.RedisError as error:
            raise StoreUnavailable(f"redis: {error}") from error

    def all_keys(self) -> Iterator[bytes]:
        try:
            for found in self._ours():
                yield found[len(PREFIX) :]
        except redis.RedisError as error:
            raise StoreUnavailable(f"redis: {error}") from error

    def _ours(self) -> Iterator[bytes]:
        """Keys of Redis that have the form of ours. Values of another type are none of ours."""
        yield from self._client.scan_iter(match=OURS, count=1000, _type="string")

    def foreign(self) -> Iterator[str]:
        try:
            ours = set(self._ours())
            for found in self._client.scan_iter(match=PREFIX + b"*", count=1000):
                if found not in ours:
                    yield cast(bytes, found).decode(errors="replace")
        except redis.RedisError as error:
            raise StoreUnavailable(f"redis: {error}") from error

    def raw(self, key: bytes) -> bytes | None:
        try:
            return self._client.get(PREFIX + key)
        except redis.RedisError as error:
            raise StoreUnavailable(f"redis: {error}") from error

    def discard(self, keys: Collection[bytes]) -> None:
        for chunk in _chunks(PREFIX + key for key in keys):
            self._client.unlink(*chunk)

    def stats(self) -> StoreStats:
        """Bytes are what Redis uses in all, as of the last writing; it does not say how many entries are ours."""
        return StoreStats(None, self._used_bytes, self._capacity, self._damaged, self._dropped)

    def close(self) -> None:
        self._client.close()


def _chunks(keys: Any) -> Any:
    chunk: list[bytes] = []
    for key in keys:
        chunk.append(cast(bytes, key))
        if len(chunk) == AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
