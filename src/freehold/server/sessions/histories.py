"""The histories of sessions that are in memory, and how much that may be."""

from __future__ import annotations

from typing import Any

from freehold.conversation import Conversation
from freehold.errors import SessionsFull
from freehold.server.sessions.store import SessionStore


class Histories:
    """Conversations by name, and what turns in flight and branches hold, in at most `limit` bytes together.

    A conversation that is on disk is given up for others, the least recently used first, and read again when it is
    used. Values in use stay valid. Only the output of turns in flight may exceed the limit.
    """

    def __init__(self, store: SessionStore, limit: int):
        self._store = store
        self._limit = limit
        self._kept: dict[str, Conversation] = {}  # the least recently used first
        self._held: dict[object, int] = {}  # bytes by holder
        self.nbytes = 0  # of both

    def of(self, name: str) -> Conversation:
        """Raises StoreFailed if it can't be read."""
        conversation = self._kept.get(name)
        if conversation is None:
            conversation = self._store.load(name)
        self._keep(name, conversation)
        return conversation

    def put(self, name: str, conversation: Conversation, settings: dict[str, Any]) -> None:
        """On disk first. Raises StoreFailed; then the one before it stays."""
        self._store.save(name, conversation, settings)
        self._keep(name, conversation)

    def drop(self, name: str) -> None:
        self._forget(name)
        self._store.delete(name)

    def hold(self, holder: object, nbytes: int) -> None:
        """`holder` has so many bytes now, in place of what it had. Raises SessionsFull; then nothing has changed."""
        growth = nbytes - self._held.get(holder, 0)
        if growth > 0:
            self.make_room(growth)
        self.nbytes += growth
        self._held[holder] = nbytes
        if not nbytes:
            del self._held[holder]

    def make_room(self, nbytes: int) -> None:
        """Give up what must be for that. Raises SessionsFull if it is not enough."""
        self._give_up(nbytes)
        if self.nbytes + nbytes > self._limit:
            raise SessionsFull(
                f"{nbytes:,} bytes more are needed, but histories and turns of sessions have {self.nbytes:,} of the "
                f"{self._limit:,} bytes that they may have (session_memory_bytes)"
            )

    def _keep(self, name: str, conversation: Conversation) -> None:
        """As the one used last."""
        self._forget(name)
        self._kept[name] = conversation
        self.nbytes += conversation.nbytes
        self._give_up(0)

    def _give_up(self, nbytes: int) -> None:
        """Until there is room for so many bytes, as far as possible."""
        while self._store.is_on_disk and self._kept and self.nbytes + nbytes > self._limit:
            self._forget(next(iter(self._kept)))

    def _forget(self, name: str) -> None:
        if (known := self._kept.pop(name, None)) is not None:
            self.nbytes -= known.nbytes
