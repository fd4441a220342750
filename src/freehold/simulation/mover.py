"""Moves the content of simulated slots between tiers: late, out of order, twice, in part, or never."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freehold.contract.arrays import Bool, Int32
from freehold.contract.orders import Kind, Order, Outcome, Report
from freehold.contract.prefix_keys import key_in_group
from freehold.memory import CacheGroup
from freehold.memory.tiers.transfer import LATE_S
from freehold.simulation.engine import SimulatedEngine, WrongKV
from freehold.simulation.model import UInt64

DELAYS = (0, 1, 1, 2, 4)
NEVER = 1 << 40
ORDER_S = 0.001  # reported duration of an order


class DifferentContent(AssertionError):
    """Two pages with the same key hold different KV."""


@dataclass(frozen=True)
class Faults:
    """`slow`, `failing` and `never` are shares of the orders: those that take many iterations, that fail in part or
    altogether, and whose end is never reported. Loads always end: a device that hangs is lost, with its engine."""

    seed: int = 0
    slow: float = 0.0
    failing: float = 0.0
    never: float = 0.0


@dataclass
class _Pending:
    order: Order
    report: Report
    due: int  # iteration


class SimulatedStorage:
    """Storage shared by several engines: `pages` by key, and the first content of each group and key."""

    def __init__(self) -> None:
        self.pages: dict[bytes, UInt64] = {}
        self.content: dict[tuple[int, bytes], bytes] = {}


class SimulatedMover:
    """Implements `contract.orders.Mover`. A target is overwritten when the order begins, and its source is read when it
    ends. So reading the target or reusing the source too early is detected."""

    def __init__(
        self, engine: SimulatedEngine, groups: Sequence[CacheGroup], page_counts: Sequence[int], faults: Faults,
        storage: SimulatedStorage,
    ):  # fmt: skip
        self.storage = storage
        self._engine = engine
        self._groups = groups
        self._size = engine.shape.page_size
        self._faults = faults
        self._rng = random.Random(f"mover {faults.seed}")
        self._host: list[UInt64] = [np.zeros((count + 1, self._size), np.uint64) for count in page_counts]
        self._pending: list[_Pending] = []
        self._iteration = 0
        self.moved = dict.fromkeys(Kind, 0)  # pages
        self.ordered = dict.fromkeys(Kind, 0)  # pages of orders that have ended
        self.ended = dict.fromkeys(Kind, 0)
        self.failed = dict.fromkeys(Kind, 0)
        self.lost_s = 0.0  # seconds that requests may have waited for orders that never end

    def begin(self, order: Order, report: Report) -> None:
        if order.kind is Kind.LOAD:
            for group, pages in enumerate(order.device):
                self._check_unused(order, group, pages)
                self._slots(True, group)[pages] = 0
        elif order.kind in (Kind.BACKUP, Kind.FETCH):
            for group, pages in enumerate(order.host):
                self._slots(False, group)[pages] = 0
        draw = self._rng.random()
        delay = 30 if draw < self._faults.slow else self._rng.choice(DELAYS)
        if draw < self._faults.never and order.kind is not Kind.LOAD:
            delay = NEVER
            self.lost_s += LATE_S[order.kind]
        self._pending.append(_Pending(order, report, self._iteration + delay))

    def _check_unused(self, order: Order, group: int, pages: Int32) -> None:
        used = self._engine.pages_in_use(group, pages)
        if len(used):
            raise WrongKV(
                f"load {order.number} writes page {used[0]} (group {group}), which a step still uses", used[0]
            )

    def _slots(self, is_device: bool, group: int) -> UInt64:
        """Return a tier's slots, uint64 [pages, slots]."""
        return self._engine.slots(group) if is_device else self._host[group]

    def wait(self, seconds: float) -> None:
        """Do nothing: simulated time does not pass while waiting."""

    def advance(self) -> None:
        """Run one iteration: end what is due, in random order."""
        self._iteration += 1
        due = [one for one in self._pending if one.due <= self._iteration]
        self._rng.shuffle(due)
        for one in due:
            self._end(one)

    def end_oldest(self) -> None:
        """End the oldest order."""
        self._end(self._pending[0])

    def heal(self) -> None:
        """Stop all faults."""
        self._faults = Faults(self._faults.seed)

    def finish(self) -> None:
        """End everything, however late."""
        for one in list(self._pending):
            self._end(one)

    def _end(self, one: _Pending) -> None:
        self._pending.remove(one)
        order = one.order
        whole = [self._move(order, group) for group in range(len(self._groups))]
        has_failed = order.kind is not Kind.PROBE and not all(part.all() for part in whole)
        if order.kind is Kind.PROBE and self._faults.failing and order.number % 5 == 0:
            has_failed, whole = True, [np.zeros_like(part) for part in whole]
        outcome = Outcome(order.number, whole, ORDER_S, "told to fail" if has_failed else None)
        self.ended[order.kind] += 1
        self.failed[order.kind] += has_failed
        self.ordered[order.kind] += sum(order.page_counts)
        for _ in range(2 if self._rng.random() < 0.1 else 1):
            one.report(outcome)

    def _move(self, order: Order, group: int) -> Bool:
        """Move pages of a group. Return which have arrived."""
        count = order.page_counts[group]
        arrives = np.ones(count, np.bool_)
        if self._rng.random() < self._faults.failing:
            arrives[self._rng.randrange(count + 1) :] = False
        if order.kind is Kind.PROBE:
            arrives &= np.array([key in self.storage.pages for key in order.keys[group]], np.bool_)
        elif order.kind is Kind.FETCH:
            arrives &= self._fetch(order, group)
        elif order.kind is Kind.STORE:
            for key, page in zip(order.keys[group], order.host[group][arrives].tolist(), strict=False):
                self.storage.pages[key] = self._host[group][page].copy()
        elif order.kind is Kind.LOAD:
            self._slots(True, group)[order.device[group][arrives]] = self._host[group][order.host[group][arrives]]
        else:
            self._host[group][order.host[group][arrives]] = self._slots(True, group)[order.device[group][arrives]]
        self.moved[order.kind] += int(np.count_nonzero(arrives))
        return arrives

    def _fetch(self, order: Order, group: int) -> Bool:
        """Fetch pages, some of which are lost or damaged. Return which were found."""
        found = np.zeros(len(order.keys[group]), np.bool_)
        for at, (key, page) in enumerate(zip(order.keys[group], order.host[group].tolist(), strict=True)):
            content = self.storage.pages.get(key)
            if content is not None and self._rng.random() >= self._faults.failing / 4:
                self._host[group][page] = content
                found[at] = True
        return found

    def check_content(self, is_device: bool, group: int, keys: Sequence[bytes], pages: Int32) -> None:
        """Check that equal keys mean equal bytes, on every tier and at any time. Raise DifferentContent."""
        slots = 1 if self._groups[group].is_state else self._size
        for key, page in zip(keys, self._slots(is_device, group)[pages], strict=True):
            raw = page[:slots].tobytes()
            if self.storage.content.setdefault((group, key), raw) != raw:
                where = "device" if is_device else "host"
                raise DifferentContent(f"group {group}: a page on the {where} does not have the content of its key")

    def has_stored(self, key: bytes, group_key: bytes) -> bool:
        """Return whether storage has a page of a group."""
        return key_in_group(key, group_key) in self.storage.pages

    @property
    def pending(self) -> set[int]:
        """The numbers of orders that have not ended."""
        return {one.order.number for one in self._pending}

    def poison(self, group: int, pages: Int32) -> None:
        """Overwrite free host pages."""
        self._host[group][pages] = 0
