"""What the prefix tree remembers of pages that it gave up, and how old pages are when used or evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

AGE_BUCKETS = 24  # bucket b counts ages below 2**b steps


@dataclass(frozen=True)
class Eviction:
    """Pages that left the tree: during which step, what wanted the room, and for how many steps nobody had
    used them."""

    step: int
    cause: str
    page_count: int
    idle_steps: int

    def __str__(self) -> str:
        return f"evicted at step {self.step} by {self.cause}, {self.idle_steps} steps after its last use"


class EvictionHistory:
    """The newest `limit` evictions, found by where they were: after the prefix `place` (`Node.place`),
    beginning with page `key`. So "was there more?" takes one look, and one page of tokens is kept.
    """

    def __init__(self, limit: int = 4096):
        self._limit = limit
        self._evictions: OrderedDict[tuple[Hashable, bytes], Eviction] = OrderedDict()

    def record(self, place: Hashable, key: bytes, eviction: Eviction) -> None:
        self._evictions[place, key] = eviction
        self._evictions.move_to_end((place, key))
        if len(self._evictions) > self._limit:
            self._evictions.popitem(last=False)

    def find(self, place: Hashable, key: bytes) -> Eviction | None:
        return self._evictions.get((place, key))


class PageAges:
    """Pages by the steps since their last use, when they were hit and when they were evicted."""

    def __init__(self) -> None:
        self.hit = [0] * AGE_BUCKETS
        self.evicted = [0] * AGE_BUCKETS

    @staticmethod
    def bucket(age: int) -> int:
        return min(age.bit_length(), AGE_BUCKETS - 1)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Pages by age: {"hit": {"<8": 12, ...}, "evicted": {...}}, empty buckets left out."""

        def named(counts: list[int]) -> dict[str, int]:
            return {f"<{1 << b}": count for b, count in enumerate(counts) if count}

        return {"hit": named(self.hit), "evicted": named(self.evicted)}
