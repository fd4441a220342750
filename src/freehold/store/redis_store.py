"""Entries in Redis or Valkey: shared by servers, and expiring after a time without use."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from freehold.contract.prefix_keys import KEY_BYTES
from freehold.store.entry import Damaged, decode, encode
from freehold.store.lane import Lane, until_failure
from freehold.store.store import Item, StoreStats, StoreUnavailable

PREFIX = b"freehold:"
OURS = PREFIX + b"?" * KEY_BYTES  # the pattern of keys of entries
TTL_S = 24 * 3600
AT_ONCE = 32  # commands in one pipeline
VALUES_AT_ONCE = 8  # a pipeline meets its deadline as a whole, or not at all
CAPACITY_CHECK_S = 1.0

Command = tuple[str, bytes] | tuple[str, bytes, bytes]
One = TypeVar("One")
Result = TypeVar("Result")


class RedisStore:
    """One value per entry, with the same bytes as on disk. Reading or asking for an entry renews its expiry.

    Redis frees memory by its own rules (`maxmemory-policy`); once it uses `capacity_bytes`, nothing more is written.
    `timeout`: seconds that a connection may be silent. Each call has its own client: closing it ends a late call.
    """

    def __init__(self, url: str, capacity_bytes: int, ttl_seconds: int = TTL_S, timeout: float = 1.0):
        self._capacity, self._ttl = capacity_bytes, ttl_seconds
        self._connect: Callable[[], Any] = partial(
            redis.Redis.from_url, url, socket_timeout=timeout, socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
        )  # fmt: skip
        self._idle = deque([self._connect()])  # a malformed address fails here
        self._asking, self._reading, self._writing = Lane("redis", 2), Lane("redis", 4), Lane("redis", 2)
        self._damaged = self._dropped = 0
        self._used_bytes, self._checked_at = 0, float("-inf")

    def check(self, deadline: float) -> None:
        try:
            self._run(self._asking, lambda client: client.exists(PREFIX), deadline)
        except StoreUnavailable as error:
            if isinstance(error.__cause__, redis.AuthenticationError | redis.ResponseError):
                raise ValueError(str(error)) from error
            raise

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return [found == 1 for found in self._each(self._asking, "expire", keys, deadline, time=self._ttl)]

    def get(self, keys: Sequence[bytes], deadline: float) -> Iterator[memoryview | None]:
        values = self._each(self._reading, "getex", keys, deadline, VALUES_AT_ONCE, ex=self._ttl)
        return (self._decoded(key, raw) for key, raw in zip(keys, values, strict=True))

    def _decoded(self, key: bytes, raw: object) -> memoryview | None:
        if raw is None:
            return None
        try:
            return decode(key, raw if isinstance(raw, bytes) else b"")
        except Damaged:
            self._damaged += 1
            return None

    def put(self, items: Sequence[Item], deadline: float) -> list[bool]:
        end = time.monotonic() + deadline
        if self._run(self._writing, self._is_full, deadline):
            self._dropped += len(items)
            return [False] * len(items)
        # Encoded by the caller's thread: a late call must not read the caller's memory.
        commands = (
            [("set", PREFIX + one.key, b"".join(encode(*one))) for one in part]
            for part in _chunks(items, VALUES_AT_ONCE)
        )
        answers = until_failure(self._answers(self._writing, commands, end - time.monotonic(), ex=self._ttl))
        stored = [answer is True for answer in answers]
        self._dropped += stored.count(False)  # Redis was out of memory
        return stored + [False] * (len(items) - len(stored))

    def _is_full(self, client: Any) -> bool:
        if time.monotonic() - self._checked_at > CAPACITY_CHECK_S:
            self._used_bytes = int(client.info("memory")["used_memory"])
            self._checked_at = time.monotonic()
        return self._used_bytes >= self._capacity

    def _each(
        self, lane: Lane, name: str, keys: Sequence[bytes], deadline: float, at_once: int = AT_ONCE, **options: int
    ) -> Iterator[Any]:
        """Yield one answer for each key: None for a value of another type."""
        commands = ([(name, PREFIX + key) for key in part] for part in _chunks(keys, at_once))
        for answer in self._answers(lane, commands, deadline, **options):
            if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
                raise StoreUnavailable(f"redis: {answer}") from answer
            yield None if isinstance(answer, Exception) else answer

    def _answers(
        self, lane: Lane, parts: Iterable[Sequence[Command]], deadline: float, **options: int
    ) -> Iterator[Any]:
        """Yield one answer for each command; a refusal is an answer, too. Each part is a pipeline."""

        def ask(part: Sequence[Command], client: Any) -> list[Any]:
            pipeline = client.pipeline(transaction=False)
            for name, *arguments in part:
                getattr(pipeline, name)(*arguments, **options)
            return pipeline.execute(raise_on_error=False)

        for answers in self._calls(lane, (partial(ask, part) for part in parts), deadline):
            yield from answers

    def _run(self, lane: Lane, use: Callable[[Any], Result], deadline: float) -> Result:
        (result,) = self._calls(lane, (use,), deadline)
        return result

    def _calls(self, lane: Lane, uses: Iterable[Callable[[Any], Result]], deadline: float) -> Iterator[Result]:
        busy: set[Any] = set()

        def call(use: Callable[[Any], Result]) -> Result:
            try:
                client = self._idle.pop()
            except IndexError:
                client = self._connect()
            busy.add(client)
            result = use(client)
            busy.discard(client)
            self._idle.append(client)
            return result

        try:
            yield from lane.each((partial(call, use) for use in uses), deadline)
        except StoreUnavailable:
            raise
        except Exception as error:  # the library raises anything on a malformed answer
            raise StoreUnavailable(f"redis: {error}") from error
        finally:
            for client in tuple(busy):
                client.connection_pool.disconnect()

    def clear(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        self._writing.drain(deadline)

        def unlink(client: Any) -> None:
            for _ in range(2):  # Redis may carry out late what late calls sent
                for keys in _chunks(_ours(client)):
                    client.unlink(*keys)

        self._run(self._writing, unlink, end - time.monotonic())

    def all_keys(self) -> Iterator[bytes]:
        with _told(), self._connect() as client:
            for found in _ours(client):
                yield found[len(PREFIX) :]

    def foreign(self) -> Iterator[str]:
        with _told(), self._connect() as client:
            ours = set(_ours(client))
            for found in client.scan_iter(match=PREFIX + b"*", count=1000):
                if found not in ours:
                    yield cast(bytes, found).decode(errors="replace")

    def raw(self, key: bytes) -> bytes | None:
        with _told(), self._connect() as client:
            return client.get(PREFIX + key)

    def discard(self, keys: Collection[bytes]) -> None:
        with _told(), self._connect() as client:
            for chunk in _chunks(keys):
                client.unlink(*(PREFIX + key for key in chunk))

    def stats(self) -> StoreStats:
        """Return counts; bytes are Redis's total use, as of the last write. It can't say how many entries are ours."""
        return StoreStats(None, self._used_bytes, self._capacity, self._damaged, self._dropped)

    def close(self) -> None:
        for lane in (self._asking, self._reading, self._writing):
            lane.close()
        for client in self._idle:
            client.close()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Raise StoreUnavailable for errors of Redis or its library."""
    try:
        yield
    except redis.RedisError as error:
        raise StoreUnavailable(f"redis: {error}") from error


def _ours(client: Any) -> Iterator[bytes]:
    """Yield keys of our form in Redis whose values are strings."""
    yield from client.scan_iter(match=OURS, count=1000, _type="string")


def _chunks(whole: Iterable[One], size: int = AT_ONCE) -> Iterator[list[One]]:
    rest = iter(whole)
    while chunk := list(itertools.islice(rest, size)):
        yield chunk
