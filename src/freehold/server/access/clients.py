"""The client that sent a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastapi import Request

from freehold.server.access.log import Record
from freehold.server.access.usage import Usage


@dataclass(frozen=True)
class Client:
    """A request's client. `name` is its key's; empty without keys, where every client is an administrator. `salt`
    separates its cache entries from those of other clients."""

    name: str = ""
    is_admin: bool = False
    salt: str = ""
    address: str = ""  # the address of the connection
    usage: Usage | None = field(default=None, compare=False)  # of its quota, if it has one
    record: Record | None = field(default=None, compare=False)  # of its current request

    @property
    def share(self) -> str:
        """The identity for fair sharing: the key's name, or without keys the address."""
        return self.name or self.address

    def may_use(self, owner: str) -> bool:
        """Return whether this client may use what `owner` opened."""
        return self.is_admin or owner == self.name

    def namespace(self, cache_salt: str | None) -> str:
        """Return the cache namespace for a request with this `cache_salt`. Distinct pairs of salts get distinct
        namespaces, since a client's own salt contains no NUL."""
        asked = cache_salt or ""
        return f"{self.salt}\0{asked}" if self.salt or "\0" in asked else asked


def client_of(request: Request) -> Client:
    """Return the client that the gate identified."""
    return request.state.client
