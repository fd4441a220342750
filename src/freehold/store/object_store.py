"""Entries in an object store with the S3 interface: shared by servers, and as large as the bucket allows."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

from obstore.exceptions import BaseError, InvalidPathError, PermissionDeniedError
from obstore.store import S3Store

from freehold.store.entry import Damaged, decode, encode
from freehold.store.lane import Lane, until_failure
from freehold.store.store import Item, StoreStats, StoreUnavailable

PREFIX = "freehold"  # for a location without one: a bucket is rarely ours alone
REQUESTS = 16  # of a kind at a time
OURS = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{62})")
# Without the right to list, a missing object is reported as forbidden.
MISSING = (FileNotFoundError, PermissionDeniedError)
BYTES = [f"{byte:02x}" for byte in range(256)]
REFUSED = re.compile(r"status code: 40[0134]")  # the server does not know the access key or bucket
REASON = re.compile(r"<Code>(.*?)</Code>(?:\s*<Message>(.*?)</Message>)?", re.DOTALL)

Result = TypeVar("Result")


class ObjectStore:
    """One object per entry, with the same bytes as on disk, at `<prefix>/<first byte of the key>/<key>`. Objects are
    replaced whole, so none is ever seen in part. The bucket's lifecycle rule decides what expires. Objects with other
    names are left as they are.

    Credentials, region and endpoint come from the environment, named as for AWS tools. `timeout`: seconds that a
    request may take.
    """

    def __init__(self, bucket: str, prefix: str = PREFIX, timeout: float = 5.0, **options: str):
        self._store = S3Store(
            bucket,
            prefix=prefix,
            config=options,  # pyright: ignore[reportArgumentType]
            client_options={"timeout": timedelta(seconds=timeout), "allow_http": True},
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout)},
        )
        self._asking, self._reading, self._writing = (Lane("s3", REQUESTS) for _ in range(3))
        self._damaged = self._dropped = 0

    def check(self, deadline: float) -> None:
        """List the first entry: unlike a missing key, a missing bucket is an error there."""
        try:
            self._asking.run(lambda: next(iter(self._store.list(chunk_size=1)), None), deadline)
        except StoreUnavailable:
            raise
        except (BaseError, OSError) as error:
            if "AccessDenied" in str(error):
                return  # without the right to list, it can still be read and written
            kind = ValueError if REFUSED.search(str(error)) else StoreUnavailable
            raise kind(f"s3: {_said(error)}") from error
        except BaseException as error:  # a panic: the address is malformed
            raise ValueError(f"s3: the bucket or AWS_ENDPOINT is not a valid address: {error}") from error

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return list(self._each(self._asking, (partial(self._has, key) for key in keys), deadline))

    def _has(self, key: bytes) -> bool:
        try:
            self._store.head(_path(key))
        except MISSING:
            return False
        return True

    def get(self, keys: Sequence[bytes], deadline: float) -> Iterator[memoryview | None]:
        return self._each(self._reading, (partial(self._get, key) for key in keys), deadline)

    def _get(self, key: bytes) -> memoryview | None:
        try:
            raw = memoryview(self._store.get(_path(key)).bytes())
        except MISSING:
            return None
        try:
            return decode(key, raw)
        except Damaged:
            self._damaged += 1
            return None

    def put(self, items: Sequence[Item], deadline: float) -> list[bool]:
        # Encoded by the caller's thread: a late request must not read the caller's memory.
        calls = (partial(self._put, _path(item.key), b"".join(encode(*item))) for item in items)
        failures = until_failure(self._each(self._writing, calls, deadline))
        stored = [failure is None for failure in failures]
        if items and not any(stored):
            raise StoreUnavailable(f"s3: {failures[0]}")
        self._dropped += stored.count(False)
        return stored + [False] * (len(items) - len(stored))

    def _put(self, path: str, raw: bytes) -> str | None:
        """Write an object. Return why it failed, or None."""
        try:
            self._store.put(path, raw)
        except (BaseError, OSError) as error:
            return _said(error)
        return None

    def _each(self, lane: Lane, calls: Iterable[Callable[[], Result]], deadline: float) -> Iterator[Result]:
        try:
            yield from lane.each(calls, deadline)
        except (StoreUnavailable, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic of the library, too
            raise StoreUnavailable(f"s3: {_said(error)}") from error

    def clear(self, deadline: float) -> None:
        end = time.monotonic() + deadline
        self._writing.drain(deadline)
        calls = (partial(self._clear, folder) for folder in BYTES)
        deque(self._each(self._writing, calls, end - time.monotonic()), maxlen=0)

    def _clear(self, folder: str) -> None:
        if paths := self._ours(folder):
            self._store.delete(paths)

    def _ours(self, folder: str) -> list[str]:
        """Return paths of entries whose keys begin with a byte. Each byte is listed separately: the library can't list
        a folder with a name that is no valid path."""
        names = (one["path"] for found in self._store.list(folder) for one in found)
        return [name for name in names if OURS.fullmatch(name)]

    def all_keys(self) -> Iterator[bytes]:
        try:
            for folder in BYTES:
                yield from (bytes.fromhex(name.rpartition("/")[2]) for name in self._ours(folder))
        except BaseError as error:
            raise StoreUnavailable(f"s3: {_said(error)}") from error

    def foreign(self) -> Iterator[str]:
        try:
            for found in self._store.list():
                yield from (one["path"] for one in found if not OURS.fullmatch(one["path"]))
        except InvalidPathError as error:
            yield f"and more: {_said(error)}"
        except BaseError as error:
            raise StoreUnavailable(f"s3: {_said(error)}") from error

    def raw(self, key: bytes) -> bytes | None:
        try:
            return bytes(self._store.get(_path(key)).bytes())
        except MISSING:
            return None
        except BaseError as error:
            raise StoreUnavailable(f"s3: {_said(error)}") from error

    def discard(self, keys: Collection[bytes]) -> None:
        try:
            self._store.delete([_path(key) for key in keys])
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"s3: {_said(error)}") from error

    def stats(self) -> StoreStats:
        """Return counts; the contents of a bucket are unknown without listing it."""
        return StoreStats(None, None, None, self._damaged, self._dropped)

    def close(self) -> None:
        for lane in (self._asking, self._reading, self._writing):
            lane.close()


def _said(error: BaseException) -> str:
    """Return the library's message without its source trace, and the reason that the server gives."""
    text = str(error)
    said = text.partition("\n")[0].partition("<?xml")[0].rstrip(": ")
    if reason := REASON.search(text):
        said = f"{said}: {': '.join(filter(None, reason.groups()))}"
    if "//169.254." in said:  # where a machine in a cloud asks for credentials
        return f"neither AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY nor credentials of the machine: {said}"
    return said


def _path(key: bytes) -> str:
    return f"{key[:1].hex()}/{key.hex()}"
