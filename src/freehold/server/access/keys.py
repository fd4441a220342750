"""API keys: their owners and rights."""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers

from freehold.contract.errors import Forbidden, Unauthorized
from freehold.server.access.clients import Client
from freehold.server.access.rights import Right
from freehold.server.access.usage import Quota
from freehold.server.config import ServerConfig

FIELDS = {"name": str, "key": str, "admin": bool, "salt": str, "requests_per_minute": int, "tokens_per_minute": int,
          "concurrency": int}  # fmt: skip


@dataclass(frozen=True)
class ApiKey:
    """A key, kept as its digest so that printing a configuration can't leak it."""

    digest: bytes
    client: Client
    quota: Quota = field(default_factory=Quota)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


class Keys:
    """All keys of a server. Without any, every client is an administrator: the server is private."""

    def __init__(self, keys: Iterable[ApiKey] = ()):
        self._keys = list(keys)

    @classmethod
    def of(cls, config: ServerConfig) -> Keys:
        """Read keys from the command line, environment and file. Raises ValueError for an invalid key or file."""
        plain = [(key, False) for key in config.api_key]
        if config.admin_api_key is not None:
            plain.append((config.admin_api_key, True))
        entries = [{"key": key, "admin": is_admin} for key, is_admin in plain]
        if config.api_key_file is not None:
            entries += _read_file(Path(config.api_key_file))
        keys = [_api_key(entry, config.isolate_keys) for entry in entries]
        for what, count in (("key", len({key.digest for key in keys})), ("name", len({k.client.name for k in keys}))):
            if count < len(keys):
                raise ValueError(f"api_key: two keys have the same {what}")
        return cls(keys)

    def find(self, headers: Headers) -> ApiKey | None:
        """Return the key that a request carries, None if unknown. Takes constant time."""
        digest = digest_of(_given(headers))
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def check(self, key: ApiKey | None, right: Right) -> Client:
        """Return the client that uses this right. Raises Unauthorized or Forbidden."""
        if not self._keys:
            return Client(is_admin=True)
        if key is None and right is not Right.OPEN:
            raise Unauthorized("wrong or missing API key: send it as 'Authorization: Bearer KEY'")
        client = Client() if key is None else key.client
        if right is Right.ADMIN and not client.is_admin:
            raise Forbidden("this route needs an admin API key (--admin-api-key)")
        return client


def _given(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _api_key(entry: dict[str, Any], is_isolated: bool) -> ApiKey:
    key = entry["key"]
    if not key.strip():
        raise ValueError("api_key: a key must not be empty")
    digest = digest_of(key)
    name = entry.get("name") or digest.hex()[:16]
    salt = entry.get("salt", name if is_isolated else "")
    if "\0" in salt:
        raise ValueError("api_key_file: a salt must not contain NUL")
    quota = Quota(*(entry.get(limit) for limit in ("requests_per_minute", "tokens_per_minute", "concurrency")))
    return ApiKey(digest, Client(name, entry.get("admin", False), salt), quota)


def _read_file(path: Path) -> list[dict[str, Any]]:
    """Read `[[keys]]` tables with FIELDS. Raises ValueError."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"api_key_file: {path} can't be read: {error}") from None
    entries: list[dict[str, Any]] = content.get("keys", [])
    if not isinstance(entries, list) or not entries or set(content) != {"keys"}:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"api_key_file: {path} must have [[keys]] tables and nothing else")
    for number, entry in enumerate(entries, start=1):
        if "key" not in entry:
            raise ValueError(f"api_key_file: table {number} of {path} has no key")
        for name, value in entry.items():
            if name not in FIELDS:
                raise ValueError(
                    f"api_key_file: table {number} of {path}: there is no field '{name}' ({', '.join(FIELDS)})"
                )
            if type(value) is not FIELDS[name] or (FIELDS[name] is int and value < 1):
                raise ValueError(f"api_key_file: table {number} of {path}: {name} must be a {_kind(FIELDS[name])}")
    return entries


def _kind(kind: type) -> str:
    return {str: "string", bool: "true or false", int: "number of at least 1"}[kind]
