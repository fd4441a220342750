"""Who asks."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastapi import Request

from freehold.server.access.log import Record
from freehold.server.access.usage import Usage


@dataclass(frozen=True)
class Client:
    """Who asks: `name` is the key's, and empty where no keys are asked for: then everybody is an administrator.
    `salt` separates what the client caches from everybody else's."""

    name: str = ""
    is_admin: bool = False
    salt: str = ""
    address: str = ""  # where the request comes from
    usage: Usage | None = field(default=None, compare=False)  # of its quota, if it has one
    record: Record | None = field(default=None, compare=False)  # of the request that it makes

    @property
    def share(self) -> str:
        """Whose share of the engine a request uses: the key's, or without keys the address's."""
        return self.name or self.address

    def may_use(self, owner: str) -> bool:
        """Whether what `owner` opened is this client's to use."""
        return self.is_admin or owner == self.name

    def namespace(self, cache_salt: str | None) -> str:
        """Where KV of a request with this `cache_salt` is kept. No `cache_salt` leads to another client's: zeros in it
        are doubled, so the one behind a client's salt is alone."""
        asked = (cache_salt or "").replace("\0", "\0\0")
        return f"{self.salt}\0{asked}" if self.salt else asked


def client_of(request: Request) -> Client:
    """As the gate has found out."""
    return request.state.client
