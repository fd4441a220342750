"""The tiers below the device, as the rest of the engine sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from freehold.arrays import Int32, Int64
from freehold.memory.group import CacheGroup
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.prefix.node import Namespace
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tiers.backup import Backup, WritePolicy
from freehold.memory.tiers.host import HostTier
from freehold.memory.tiers.loads import Loads, RoomMaker
from freehold.memory.tiers.reach import Reach
from freehold.memory.tiers.storage import PrefetchPolicy, Storage
from freehold.memory.tiers.transfer import Hold, TransferTable
from freehold.mover import Kind, Mover
from freehold.prefix_keys import KeyChain, fingerprint


@dataclass(frozen=True)
class StoragePlan:
    """There is storage behind the host. `group_keys`: a fingerprint of each cache group."""

    group_keys: tuple[bytes, ...]
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT


@dataclass(frozen=True)
class TierPlan:
    """`page_counts`: host pages of each cache group, `page_bytes` the size of each. `identity`: a fingerprint of all
    that the bytes of a page depend on but namespace, weights and tokens."""

    page_counts: tuple[int, ...]
    page_bytes: tuple[int, ...]
    identity: bytes
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    storage: StoragePlan | None = None


class Tiers:
    """Host memory and storage under a prefix tree. `weights`: a fingerprint of the weights that compute now."""

    def __init__(
        self, plan: TierPlan, groups: Sequence[CacheGroup], tree: PrefixTree, epochs: Epochs, mover: Mover,
        room: RoomMaker,
    ):  # fmt: skip
        self.plan = plan
        self.weights = b""
        self.transfers = TransferTable(mover, len(groups), epochs)
        self.host = HostTier(groups, plan.page_counts, tree.page_size, epochs)
        reach = Reach(groups, tree, self.host)
        self.storage: Storage | None = None
        if plan.storage is not None:
            policy, names = plan.storage.prefetch_policy, plan.storage.group_keys
            self.storage = Storage(policy, names, tree, self.host, self.transfers, reach)
        self.backup = Backup(plan.write_policy, tree, self.host, self.transfers, self.storage)
        self.loads = Loads(plan.page_bytes, tree, self.host, self.transfers, reach, room)
        self._tree = tree
        tree.seed = self.seed
        tree.watchers.append(self.backup)
        tree.rescuer = self.backup

    def seed(self, namespace: Namespace) -> bytes:
        """Where the keys of a namespace begin."""
        return fingerprint({"identity": self.plan.identity, "salt": namespace.salt, "weights": self.weights})

    def keys(self, namespace: Namespace, tokens: Int32) -> KeyChain:
        """Those of a sequence in `namespace`, which is one of the weights that compute now."""
        return KeyChain(self.seed(namespace), tokens, self._tree.page_size)

    def settle(self, now: float) -> None:
        """The one place where transfers end and backups begin: called in every iteration, before anything is planned,
        whether anybody computes or not. `now`: seconds of the scheduler's clock."""
        self.transfers.settle_all(now)
        self.backup.begin()
        if self.storage is not None:
            self.storage.begin()

    @property
    def has_work(self) -> bool:
        """Whether `settle` would bring anything on."""
        is_to_store = self.storage is not None and self.storage.has_news
        return bool(self.transfers.outcomes) or self.backup.has_news or is_to_store

    def returning(self) -> Int64:
        """Device pages of each group that evictions have promised and that are still being copied; those of late
        transfers nobody counts on."""
        counts = np.array([len(self.backup.rescued_pages(group)) for group in range(len(self.host.pages))], np.int64)
        for transfer in self.transfers:
            if transfer.order.kind is Kind.BACKUP and not self.transfers.is_late(transfer):
                counts += [len(part) for part in transfer.device]
        return counts

    @property
    def holds(self) -> list[Hold]:
        """What transfers hold on the device."""
        return [transfer.hold for transfer in self.transfers if transfer.hold is not None]

    @property
    def is_loading(self) -> bool:
        """Whether a load is in flight that is not late."""
        return any(
            transfer.order.kind is Kind.LOAD and not self.transfers.is_late(transfer) for transfer in self.transfers
        )

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counts for metrics: pages on the host by owner, pages moved and lost so far, transfers in flight."""
        storage, backup = self.storage, self.backup
        flying = Counter(transfer.order.kind.value for transfer in self.transfers)
        return {
            "host_pages": {
                group.name: {
                    "capacity": pages.pool.capacity,
                    "free": pages.pool.free_count,
                    "mirror": pages.mirror_count,
                    "alone": len(pages) - pages.mirror_count,
                    "transfer": pages.pool.held_count - len(pages),
                }
                for group, pages in zip(self.host.groups, self.host.pages, strict=True)
            },
            "moved_pages": {
                "backup": backup.written,
                "load": self.loads.loaded_pages,
                "store": 0 if storage is None else storage.stored,
                "fetch": 0 if storage is None else storage.fetched,
            },
            "lost_pages": {
                "host_full": backup.dropped,
                "abandoned": backup.abandoned,
                "not_stored": 0 if storage is None else storage.dropped,
                "host_evicted": sum(pages.evicted_count for pages in self.host.pages),
            },
            "transfers": {kind.value: flying[kind.value] for kind in Kind},
        }

    def device_pages(self, group: int) -> int:
        """Pages that transfers own on the device."""
        return len(self.backup.rescued_pages(group)) + sum(len(one.device[group]) for one in self.transfers)
