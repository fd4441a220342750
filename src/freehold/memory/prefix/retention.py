"""How long a prefix is worth keeping: hints of requests, which cached pages carry until they fade."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freehold.memory.prefix.node import Node

PRIORITY_MAX = 100
STALE_MAX = 1024
DONE = -1  # the level of what nobody will ask for again


@dataclass(frozen=True)
class Retention:
    """A hint: the first `end` tokens of a sequence (None: all of them, output included) will be asked for
    again. Under pressure pages of lower priority go first, whatever their age. `ttl` is soft: after so many
    seconds the priority is halved, and again, until nothing is left of it. Priority 0 says that nobody will
    come back: these pages go before all others.

    Nothing is ever pinned by a hint, and one that exceeds the budget is refused.
    Raises ValueError naming the field.
    """

    priority: int = 50
    ttl: float = 300.0
    end: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= PRIORITY_MAX:
            raise ValueError(f"priority: must be between 0 and {PRIORITY_MAX}, got {self.priority}")
        if not 0 < self.ttl <= 7 * 86400:
            raise ValueError(f"ttl: must be positive and at most a week of seconds, got {self.ttl:g}")
        if self.end is not None and self.end < 0:
            raise ValueError(f"end: must not be negative, got {self.end}")


class Fading:
    """The nodes with a priority, by the time when it is next halved. An entry whose node has been given
    another time since, or has left the tree, is stale."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Node]] = []
        self._limit = STALE_MAX  # entries at which stale ones are looked for

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, node: Node) -> None:
        heapq.heappush(self._heap, (node.fades_at, node.serial, node))
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if _is_current(entry)]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + STALE_MAX

    def due(self, now: float, limit: int) -> Iterator[Node]:
        """Nodes whose time has come, `limit` entries at most, taken out one by one: dealing with one may make
        another entry of it stale."""
        for _ in range(limit):
            if not self._heap or self._heap[0][0] > now:
                return
            entry = heapq.heappop(self._heap)
            if _is_current(entry):
                yield entry[2]


def _is_current(entry: tuple[float, int, Node]) -> bool:
    when, _, node = entry
    return node.level > 0 and node.parent is not None and node.fades_at == when
