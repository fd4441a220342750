"""The histories of sessions that are in memory, and how much that may be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from freehold.contract.errors import SessionsFull
from freehold.server.sessions.history import Change, History
from freehold.server.sessions.store import SessionRow, SessionStore

OWNERS_SHARE = 0.75  # of what there is, for one owner: the others can go on
SESSIONS_MAX = 100_000  # each has about 1,500 bytes besides its history


def check_count(names: Collection[str], owner: str) -> None:
    """Whether one more session of this owner may be open beside those of these names. Raises SessionsFull."""
    most = int(OWNERS_SHARE * SESSIONS_MAX) if owner else SESSIONS_MAX
    if len(names) >= SESSIONS_MAX or (len(names) >= most and sum(_owner(name) == owner for name in names) >= most):
        raise SessionsFull(f"{most:,} sessions may be open: close some, or open them with a timeout")


class Histories:
    """Histories by name, and the memory of turns in flight, in at most `limit` bytes together. A name is its owner's,
    `owner/id`, or without keys that of nobody.

    If there is a file, the least recently used histories are evicted and read again when they are used. Conversations
    that were taken from an evicted history stay valid. Only the output of turns in flight may exceed the limit. The
    caller holds the session's lock while it changes a history or reads one that may not be in memory.
    """

    def __init__(self, store: SessionStore, limit: int):
        self._store = store
        self._limit = limit
        self._kept: dict[str, History] = {}  # the least recently used first
        self._held: dict[object, int] = {}  # bytes by holder
        self._owned: Counter[str] = Counter()  # bytes of both by owner
        self.nbytes = 0  # of all

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
        """Count `nbytes` for `holder`, which is the owner's, instead of what it had. Raises SessionsFull; then nothing
        has changed."""
        growth = nbytes - self._held.get(holder, 0)
        if growth > 0:
            self._make_room(growth, owner)
        self._count(owner, growth)
        self._held[holder] = nbytes
        if not nbytes:
            del self._held[holder]

    def _make_room(self, nbytes: int, owner: str) -> None:
        """Evict histories for so many bytes of an owner's. Raises SessionsFull if that is not enough."""
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
        """Wait until the disk has what was put and dropped before."""
        await self._store.settle()

    def _keep(self, name: str, history: History) -> None:
        """Keep a history in memory as the one used last."""
        self.give_up(name)
        self._kept[name] = history
        self._count(_owner(name), history.nbytes)
        self._give_up(0)

    def _give_up(self, nbytes: int) -> None:
        """Evict histories until there is room for so many bytes, as far as possible."""
        while self._store.is_on_disk and self._kept and self.nbytes + nbytes > self._limit:
            self.give_up(next(iter(self._kept)))


def _owner(name: str) -> str:
    return name.rpartition("/")[0]
