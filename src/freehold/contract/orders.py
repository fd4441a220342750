"""The contract between memory and whoever moves the bytes of pages between tiers."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from freehold.contract.arrays import Bool, Int32


class Kind(StrEnum):
    """What a transfer does."""

    BACKUP = "backup"  # device to host
    LOAD = "load"  # host to device
    STORE = "store"  # host to storage
    FETCH = "fetch"  # storage to host
    PROBE = "probe"  # ask storage what it has: moves nothing


@dataclass(frozen=True)
class Order:
    """What to move. Each list has an entry for each cache group, and those have one for each page: `host` and `device`
    pages int32 [n], `keys` of entries in storage. Which of them count depends on the kind."""

    number: int
    kind: Kind
    host: Sequence[Int32]
    device: Sequence[Int32] = ()
    keys: Sequence[Sequence[bytes]] = ()

    @property
    def page_counts(self) -> list[int]:
        """Pages of each group."""
        return [len(part) for part in (self.keys if self.kind is Kind.PROBE else self.host)]


@dataclass(frozen=True)
class Outcome:
    """What became of an order. `whole` bool [n] for each group: which pages have arrived, or are there."""

    number: int
    whole: Sequence[Bool]
    seconds: float = 0.0
    error: str | None = None


Report = Callable[[Outcome], None]


class Mover(Protocol):
    """Moves bytes, and never decides anything: it allocates and frees nothing."""

    def begin(self, order: Order, report: Report) -> None:
        """Queue an order. `report` is called once, by any thread, when nothing of the order will be touched again."""
        ...

    def wait(self, seconds: float) -> None:
        """Until something was reported since the last call, but no longer than that."""
        ...


class Outcomes:
    """Outcomes on their way from the threads that move bytes to the one that moves pages."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def report(self, outcome: Outcome) -> None:
        self._queue.put(outcome)

    def take(self) -> list[Outcome]:
        """Those that came since the last call."""
        return [self._queue.get() for _ in range(self._queue.qsize())]

    def __bool__(self) -> bool:
        return not self._queue.empty()
