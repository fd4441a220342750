"""Session histories in memory, and their memory limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from freehold.contract.errors import SessionsFull
from freehold.server.sessions.history import Change, History
from freehold.server.sessions.store import SessionRow, SessionStore

OWNERS_SHARE = 0.75  # the limit for one owner, so that others can continue
SESSIONS_MAX = 100_000  # each has about 1,500 bytes besides its history


def check_count(names: Collection[str], owner: str) -> None:
    """Raise SessionsFull if the owner may not open another session beside these."""
    most = int(OWNERS_SHARE * SESSIONS_MAX) if owner else SESSIONS_MAX
    if len(names) >= SESSIONS_MAX or (len(names) >= most and sum(_owner(name) == owner for name in names) >= most):
        raise SessionsFull(f"{most:,} sessions may be open: close some, or open them with a timeout")


class Histories:
    """Histories by name and the memory of turns in flight, at most `limit` bytes together. A name is `owner/id`, or
    without keys just `id`.

    With a file, the least recently used histories are evicted and read back on use. Conversations taken from an evicted
    history stay valid. Only the output of turns in flight may exceed the limit. The caller must hold the session's lock
    while it changes a history or reads one that may not be in memory.
    """

    def __init__(self, store: SessionStore, limit: int):
        self._store = store
        self._limit = limit
        self._kept: dict[str, History] = {}  # least recently used first
        self._held: dict[object, int] = {}  # bytes by holder
        self._owned: Counter[str] = Counter()  # bytes of both by owner
        self.nbytes = 0  # of all

    def known(self, name: str) -> History | None:
        """Return the history, or None if it is not in memory."""
        history = self._kept.get(name)
        if history is not None:
            self._keep(name, history)
        return history

    async def of(self, name: str) -> History:
        """Return the history, loading it if necessary. Raises StoreFailed if it can't be read."""
        known = self.known(name)
        if known is None:
            known = await self._store.load(name)
            self._keep(name, known)
        return known

    async def put(self, row: SessionRow, history: History, change: Change) -> None:
        """Apply a change, on disk first. Raises StoreFailed, leaving the history unchanged."""
        await self._store.save(row, change)
        self.give_up(row.id)
        history.apply(change)
        self._keep(row.id, history)

    def give_up(self, name: str) -> None:
        """Drop a history from memory only."""
        if (known := self._kept.pop(name, None)) is not None:
            self._count(_owner(name), -known.nbytes)

    def _count(self, owner: str, nbytes: int) -> None:
        self.nbytes += nbytes
        self._owned[owner] += nbytes
        if not self._owned[owner]:
            del self._owned[owner]

    def drop(self, name: str) -> None:
        self.give_up(name)
        self._store.delete(name)

    def hold(self, holder: object, nbytes: int, owner: str) -> None:
        """Count `nbytes` for the owner's `holder`, replacing its previous count. Raises SessionsFull, leaving
        everything unchanged."""
        growth = nbytes - self._held.get(holder, 0)
        if growth > 0:
            self._make_room(growth, owner)
        self._count(owner, growth)
        self._held[holder] = nbytes
        if not nbytes:
            del self._held[holder]

    def _make_room(self, nbytes: int, owner: str) -> None:
        """Evict histories to fit `nbytes` of an owner. Raises SessionsFull if that is not enough."""
        self._give_up(nbytes)
        share = int(OWNERS_SHARE * self._limit) if owner else self._limit
        while self._store.is_on_disk and self._owned[owner] + nbytes > share:
            theirs = next((name for name in self._kept if _owner(name) == owner), None)
            if theirs is None:
                break
            self.give_up(theirs)
        for used, limit in ((self.nbytes, self._limit), (self._owned[owner], share)):
            if used + nbytes > limit:
                raise SessionsFull(
                    f"{nbytes:,} bytes more are needed, but histories and turns of sessions have {used:,} of the "
                    f"{limit:,} bytes that they may have (session_memory_bytes)"
                )

    async def settle(self) -> None:
        """Wait until earlier puts and drops are on disk."""
        await self._store.settle()

    def _keep(self, name: str, history: History) -> None:
        """Keep a history in memory as the most recently used."""
        self.give_up(name)
        self._kept[name] = history
        self._count(_owner(name), history.nbytes)
        self._give_up(0)

    def _give_up(self, nbytes: int) -> None:
        """Evict histories, as far as possible, until `nbytes` more fit."""
        while self._store.is_on_disk and self._kept and self.nbytes + nbytes > self._limit:
            self.give_up(next(iter(self._kept)))


def _owner(name: str) -> str:
    return name.rpartition("/")[0]
