"""The histories of sessions that are in memory, and how much that may be."""

from __future__ import annotations

from freehold.errors import SessionsFull
from freehold.server.sessions.history import Change, History
from freehold.server.sessions.store import SessionRow, SessionStore


class Histories:
    """Histories by name, and the memory of turns in flight, in at most `limit` bytes together.

    If there is a file, the least recently used histories are evicted and read again when they are used. Conversations
    that were taken from an evicted history stay valid. Only the output of turns in flight may exceed the limit. The
    caller holds the session's lock while it changes a history or reads one that may not be in memory.
    """

    def __init__(self, store: SessionStore, limit: int):
        self._store = store
        self._limit = limit
        self._kept: dict[str, History] = {}  # the least recently used first
        self._held: dict[object, int] = {}  # bytes by holder
        self.nbytes = 0  # of both

    def known(self, name: str) -> History | None:
        """The history, or None if it is not in memory."""
        history = self._kept.get(name)
        if history is not None:
            self._keep(name, history)
        return history

    async def of(self, name: str) -> History:
        """The history, from the store if it is not in memory. Raises StoreFailed if it can't be read."""
        known = self.known(name)
        if known is None:
            known = await self._store.load(name)
            self._keep(name, known)
        return known

    async def put(self, row: SessionRow, history: History, change: Change) -> None:
        """Apply a change, on disk first. Raises StoreFailed; then the history stays as it is."""
        await self._store.save(row, change)
        self.give_up(row.id)
        history.apply(change)
        self._keep(row.id, history)

    def give_up(self, name: str) -> None:
        """Drop a history from memory alone."""
        if (known := self._kept.pop(name, None)) is not None:
            self.nbytes -= known.nbytes

    def drop(self, name: str) -> None:
        self.give_up(name)
        self._store.delete(name)

    def hold(self, holder: object, nbytes: int) -> None:
        """Count `nbytes` for `holder` instead of what it had. Raises SessionsFull; then nothing has changed."""
        growth = nbytes - self._held.get(holder, 0)
        if growth > 0:
            self.make_room(growth)
        self.nbytes += growth
        self._held[holder] = nbytes
        if not nbytes:
            del self._held[holder]

    def make_room(self, nbytes: int) -> None:
        """Evict histories for so many bytes. Raises SessionsFull if that is not enough."""
        self._give_up(nbytes)
        if self.nbytes + nbytes > self._limit:
            raise SessionsFull(
                f"{nbytes:,} bytes more are needed, but histories and turns of sessions have {self.nbytes:,} of the "
                f"{self._limit:,} bytes that they may have (session_memory_bytes)"
            )

    async def settle(self) -> None:
        """Wait until the disk has what was put and dropped before."""
        await self._store.settle()

    def _keep(self, name: str, history: History) -> None:
        """Keep a history in memory as the one used last."""
        self.give_up(name)
        self._kept[name] = history
        self.nbytes += history.nbytes
        self._give_up(0)

    def _give_up(self, nbytes: int) -> None:
        """Evict histories until there is room for so many bytes, as far as possible."""
        while self._store.is_on_disk and self._kept and self.nbytes + nbytes > self._limit:
            self.give_up(next(iter(self._kept)))
