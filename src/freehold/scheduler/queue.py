"""The waiting queue: admission order without starvation."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice

from freehold.scheduler.request import Request
from freehold.scheduler.shares import Shares

Key = tuple[int, int]
LineKey = tuple[int, int]  # negated priority, so that the highest sorts first; number of the client

RANKED_MAX = 16  # requests looked up in the prefix tree per pass
_BEFORE_ALL = -(1 << 60)


@dataclass
class _Entry:
    key: Key
    number: int  # position in the order of entry, from 1
    version: int = -1  # of the prefix tree, when the match was looked up


class Line:
    """Waiting requests in the order of their keys.

    Entries are numbered. The request with entry number e is *due* once e + overtaken_max requests have left the
    line: at least overtaken_max of them entered later.
    """

    def __init__(self, overtaken_max: int):
        self._overtaken_max = overtaken_max
        self._sorted: list[tuple[Key, Request]] = []
        self._entries: dict[Request, _Entry] = {}
        self._by_number: dict[int, Request] = {}
        self._entered = 0
        self._left = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def __getitem__(self, position: int) -> Request:
        return self._sorted[position][1]

    def push(self, request: Request) -> None:
        self._entered += 1
        entry = self._entries[request] = _Entry((0, request.order), self._entered)
        self._by_number[entry.number] = request
        insort(self._sorted, (entry.key, request))

    def remove(self, request: Request) -> Request | None:
        """Remove the request. Return the request that becomes due, if any."""
        entry = self._entries.pop(request)
        del self._sorted[self._position(entry.key)]
        del self._by_number[entry.number]
        self._left += 1
        return self._by_number.get(self._left - self._overtaken_max)

    def overtake(self) -> None:
        """Count a less important request of the same client that left the queue as if it had been in this line."""
        self._entered += 1
        self._left += 1

    def is_due(self, request: Request) -> bool:
        return self._left - self._entries[request].number >= self._overtaken_max

    def put_first(self, request: Request) -> None:
        """Move the request to the front, behind earlier entries already put first."""
        self.move(request, (_BEFORE_ALL, self._entries[request].number))

    def move(self, request: Request, key: Key) -> None:
        """Sort the request under `key`, which must be unique."""
        entry = self._entries[request]
        if key != entry.key:
            del self._sorted[self._position(entry.key)]
            entry.key = key
            insort(self._sorted, (key, request))

    def is_ranked(self, request: Request, version: int) -> bool:
        """Return whether its match was looked up in this version of the tree."""
        return self._entries[request].version == version

    def rank(self, request: Request, version: int, match_length: int) -> None:
        self._entries[request].version = version
        self.move(request, (-match_length, request.order))

    def _position(self, key: Key) -> int:
        # A bare (key,) sorts before the pair that begins with it, and keys are unique.
        return bisect_left(self._sorted, (key,))  # pyright: ignore[reportArgumentType]


@dataclass
class _Cursor:
    """How many requests of a line were visited. Those removed since don't count."""

    line: Line
    passed: int = 0

    @property
    def has_more(self) -> bool:
        return self.passed < len(self.line)

    def advance(self) -> Iterator[Request]:
        request = self.line[self.passed]
        yield request
        self.passed += self.has_more and self.line[self.passed] is request


class WaitingQueue:
    """The waiting requests, one line per client: `fcfs` by arrival, `lpm` by the longest cached prefix. Lines take
    turns, one request each, beginning with the client served least (`Shares`). Under `priority` all more important
    requests go first. A retracted request keeps its arrival, so it returns near the front of its line.

    Under `lpm` a due request goes first in its line; under every policy it no longer waits for a prefix that another
    request computes. So no request is overtaken for ever. Examining a request does not cost its turn: it leaves the
    queue only when it is admitted or ends. Every operation is O(log n) comparisons, and an ended request leaves nothing
    behind.
    """

    def __init__(self, policy: str = "fcfs", overtaken_max: int = 64, shares: Shares | None = None):
        self.policy = policy
        self._shares = Shares() if shares is None else shares
        self._overtaken_max = overtaken_max
        self._lines: dict[LineKey, Line] = {}
        self._levels: Counter[int] = Counter()  # lines of each priority
        self._sorted: list[LineKey] = []
        self._sorted_at = -1  # the count of charges it was sorted at; -1 if lines were added or removed since
        self._count = 0
        self._unranked: OrderedDict[Request, None] = OrderedDict()  # least recently looked up first

    def __len__(self) -> int:
        return self._count

    def in_turn(self) -> Iterator[Request]:
        """Yield every request, next first. A yielded request may be removed before the next one is asked for."""
        for _, keys in groupby(self._lines_in_turn(), key=lambda key: key[0]):
            going = [_Cursor(self._lines[key]) for key in keys]
            while going:
                for cursor in going:
                    yield from cursor.advance()
                going = [cursor for cursor in going if cursor.has_more]

    def peek(self) -> Request | None:
        """Return the next request, or None if the queue is empty."""
        return next(self.in_turn(), None) if self._count else None

    def clients(self) -> set[int]:
        """Return the numbers of the clients with waiting requests."""
        return {client for _, client in self._lines}

    def push(self, request: Request) -> None:
        key = self._line_of(request)
        if key not in self._lines:
            self._lines[key] = Line(self._overtaken_max)
            self._sorted_at = -1
            self._levels[key[0]] += 1
        self._lines[key].push(request)
        self._count += 1
        if self.policy == "lpm":
            self._unranked[request] = None
            self._unranked.move_to_end(request, last=False)

    def remove(self, request: Request) -> None:
        """Remove a request that was admitted or has ended."""
        key = self._line_of(request)
        line = self._lines[key]
        due = line.remove(request)
        for level in self._levels:
            if level < key[0] and (level, key[1]) in self._lines:
                self._lines[level, key[1]].overtake()
        self._count -= 1
        self._unranked.pop(request, None)
        if len(line) == 0:
            del self._lines[key]
            self._sorted_at = -1
            self._levels.subtract([key[0]])
            self._levels += Counter()
        if due is not None and self.policy == "lpm":
            self._unranked.pop(due)
            line.put_first(due)

    def is_due(self, request: Request) -> bool:
        """Return True once `overtaken_max` later requests of its client, no more important, went first. It must then
        not wait for any of them."""
        return self._lines[self._line_of(request)].is_due(request)

    def rank(self, version: int, match_length: Callable[[Request], int]) -> None:
        """Under `lpm`, re-sort by what is cached now. Look up at most RANKED_MAX requests, least recently looked up
        first, and none twice for the same `version` of the prefix tree."""
        for request in list(islice(self._unranked, RANKED_MAX)):
            line = self._lines[self._line_of(request)]
            if line.is_ranked(request, version):
                return
            self._unranked.move_to_end(request)
            line.rank(request, version, match_length(request))

    def _lines_in_turn(self) -> list[LineKey]:
        if self._sorted_at != self._shares.charges:
            self._sorted = sorted(self._lines, key=lambda key: (key[0], self._shares.served(key[1]), key[1]))
            self._sorted_at = self._shares.charges
        return self._sorted

    def _line_of(self, request: Request) -> LineKey:
        return (-request.priority if self.policy == "priority" else 0), request.client_number
