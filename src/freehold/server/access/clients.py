"""Who asks."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request


@dataclass(frozen=True)
class Client:
    """Who asks: `name` is made of the key, and empty where none is asked for."""

    name: str = ""
    is_admin: bool = False

    def may_use(self, owner: str) -> bool:
        """Whether what `owner` opened is this client's to use. What nobody owns is everybody's."""
        return self.is_admin or owner in ("", self.name)


def client_of(request: Request) -> Client:
    """After `Keys.check`."""
    return request.state.client
