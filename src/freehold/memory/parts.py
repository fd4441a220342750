"""Read-only views of the parts of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from freehold.memory.group import CacheGroup
from freehold.memory.lease_table import LeaseTable
from freehold.memory.ledger.pool import PagePool
from freehold.memory.prefix.pins import PinTable
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.shape import MemoryShape
from freehold.memory.tails import TailTable
from freehold.memory.tiers.tiers import Tiers


class RoomParts(Protocol):
    """The parts of `Memory` needed to count pages and make room on the device."""

    page_size: int
    groups: Sequence[CacheGroup]
    pools: list[PagePool]
    tree: PrefixTree
    tails: TailTable
    pins: PinTable
    leases: LeaseTable


class Parts(RoomParts, Protocol):
    """The parts of `Memory` needed by the audit and the explanations."""

    shape: MemoryShape
    tiers: Tiers | None
