"""The waiting queue: who is admitted next, and why nobody waits for ever."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from freehold.scheduler.request import Request

Key = tuple[int, int]

RANKED_MAX = 16  # requests whose match is looked up in one pass
_BEFORE_ALL = -(1 << 60)


@dataclass
class _Entry:
    key: Key
    number: int  # of entries to the queue, this one included
    version: int = -1  # of the prefix tree, when the match was looked up


class WaitingQueue:
    """The waiting requests in order: `fcfs` by arrival, `priority` by priority then arrival, `lpm` by the
    longest cached prefix. A retracted request keeps its arrival, so it comes back near the front.

    Entries are numbered. The request with entry number e is *due* once e + overtaken_max requests have left the
    queue, for then at least overtaken_max of them came later. Under `lpm` whoever is due goes first, in order of
    entry; under every policy it no longer waits for a prefix that somebody else computes. So nobody is overtaken
    for ever, and being looked at costs nobody its turn: a request leaves the queue only when it is admitted or
    ends. Every operation is O(log n) comparisons, and an ended request leaves nothing behind.
    """

    def __init__(self, policy: str = "fcfs", overtaken_max: int = 64):
        self.policy = policy
        self._overtaken_max = overtaken_max
        self._line: list[tuple[Key, Request]] = []
        self._entries: dict[Request, _Entry] = {}
        self._by_number: dict[int, Request] = {}
        self._entered = 0
        self._left = 0
        self._unranked: OrderedDict[Request, None] = OrderedDict()  # least recently looked up first

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, request: Request) -> bool:
        return request in self._entries

    def __getitem__(self, position: int) -> Request:
        """Position 0 is next in line."""
        return self._line[position][1]

    def push(self, request: Request) -> None:
        self._entered += 1
        entry = self._entries[request] = _Entry(self._key(request), self._entered)
        self._by_number[entry.number] = request
        insort(self._line, (entry.key, request))
        if self.policy == "lpm":
            self._unranked[request] = None
            self._unranked.move_to_end(request, last=False)

    def remove(self, request: Request) -> None:
        """The request is admitted, or it has ended."""
        entry = self._entries.pop(request)
        del self._line[self._position(entry.key)]
        del self._by_number[entry.number]
        self._unranked.pop(request, None)
        self._left += 1
        # With each departure one entry number becomes due.
        due = self._by_number.get(self._left - self._overtaken_max)
        if due is not None and self.policy == "lpm":
            self._unranked.pop(due)
            self._move(due, (_BEFORE_ALL, self._entries[due].number))

    def peek(self) -> Request | None:
        """The next in line; None when nobody waits."""
        return self._line[0][1] if self._line else None

    def is_due(self, request: Request) -> bool:
        """Whether so many others left the queue before it that it must not wait for any of them."""
        return self._left - self._entries[request].number >= self._overtaken_max

    def rank(self, version: int, match_length: Callable[[Request], int]) -> None:
        """For policy `lpm`: bring the order up to date with what is cached. Looks up those whose match was looked
        up longest ago, RANKED_MAX at most, and nobody twice for the same `version` of the prefix tree."""
        for request in list(islice(self._unranked, RANKED_MAX)):
            entry = self._entries[request]
            if entry.version == version:
                return
            entry.version = version
            self._unranked.move_to_end(request)
            key = -match_length(request), request.order
            if key != entry.key:
                self._move(request, key)

    def _move(self, request: Request, key: Key) -> None:
        entry = self._entries[request]
        del self._line[self._position(entry.key)]
        entry.key = key
        insort(self._line, (key, request))

    def _position(self, key: Key) -> int:
        # A key alone sorts before the pair that begins with it, and keys are unique.
        return bisect_left(self._line, (key,))  # pyright: ignore[reportArgumentType]

    def _key(self, request: Request) -> Key:
        return (-request.priority if self.policy == "priority" else 0), request.order
