"""The waiting queue: who is admitted next."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from freehold.scheduler.request import Request

Key = tuple[int, int]

# Ranking by longest prefix match looks at every waiting request; a longer queue is served in order of
# arrival, and a request passed over this often goes first.
LPM_QUEUE_MAX = 128
LPM_PASSED_OVER_MAX = 64


class WaitingQueue:
    """A heap of waiting requests: `fcfs` by arrival, `priority` by priority then arrival, `lpm` by the
    longest cached prefix. A retracted request keeps its arrival, so it comes back near the front.

    Ended requests are dropped when they surface.
    """

    def __init__(self, policy: str = "fcfs"):
        self.policy = policy
        self._heap: list[tuple[Key, Request]] = []
        self._waiting: set[Request] = set()
        self._passed_over: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def __iter__(self):
        return iter(self._waiting)

    def push(self, request: Request) -> None:
        self._waiting.add(request)
        heapq.heappush(self._heap, (self._key(request, 0), request))

    def discard(self, request: Request) -> None:
        self._waiting.discard(request)
        self._passed_over.pop(request, None)

    def pop(self) -> Request | None:
        """The next in line, taken out; None when nobody waits."""
        while self._heap:
            request = heapq.heappop(self._heap)[1]
            if request in self._waiting:
                self.discard(request)
                return request
        return None

    def peek(self) -> Request | None:
        """The next in line, left where it is."""
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def rank_by_match(self, match_length: Callable[[Request], int]) -> None:
        """For policy `lpm`: order the queue by `match_length`, longest first."""
        if self.policy != "lpm" or len(self._waiting) > LPM_QUEUE_MAX:
            return
        for request in self._waiting:
            self._passed_over[request] = self._passed_over.get(request, 0) + 1
        self._heap = [(self._key(request, match_length(request)), request) for request in self._waiting]
        heapq.heapify(self._heap)

    def _key(self, request: Request, match_length: int) -> Key:
        if self.policy == "priority":
            return -request.priority, request.order
        if self.policy == "lpm" and self._passed_over.get(request, 0) < LPM_PASSED_OVER_MAX:
            return 1 - match_length, request.order
        return -(1 << 60) if self.policy == "lpm" else 0, request.order
