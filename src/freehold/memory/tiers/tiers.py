"""The tiers below the device: host and storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from freehold.contract.arrays import Int32, Int64
from freehold.contract.orders import Kind, Mover
from freehold.contract.prefix_keys import KeyChain, fingerprint
from freehold.memory.group import CacheGroup
from freehold.memory.ledger.epochs import Epochs
from freehold.memory.prefix.node import Namespace
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.tiers.backup import Backup, WritePolicy
from freehold.memory.tiers.confirming import Confirming
from freehold.memory.tiers.host import HostTier
from freehold.memory.tiers.loads import Loads, RoomMaker
from freehold.memory.tiers.reach import Reach
from freehold.memory.tiers.saving import Saving
from freehold.memory.tiers.storage import PrefetchPolicy, Storage
from freehold.memory.tiers.transfer import Hold, TransferTable


@dataclass(frozen=True)
class TierPlan:
    """`page_counts`: host pages of each cache group, `page_bytes` the size of each, `group_keys` a fingerprint of each.
    `identity`: a fingerprint of everything the bytes of a page depend on except group, namespace, weights and tokens.
    With a `prefetch_policy` there is storage behind the host from the start."""

    page_counts: tuple[int, ...]
    page_bytes: tuple[int, ...]
    group_keys: tuple[bytes, ...]
    identity: bytes
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    prefetch_policy: PrefetchPolicy | None = None


class Tiers:
    """Host memory and storage under a prefix tree. `weights`: a fingerprint of the current weights."""

    def __init__(
        self, plan: TierPlan, groups: Sequence[CacheGroup], tree: PrefixTree, epochs: Epochs, mover: Mover,
        room: RoomMaker,
    ):  # fmt: skip
        self.plan = plan
        self.weights = b""
        self.transfers = TransferTable(mover, len(groups), epochs)
        self.host = HostTier(groups, plan.page_counts, tree.page_size, epochs)
        self.reach = Reach(groups, tree, self.host)
        self._tree = tree
        self.storage: Storage | None = None
        if plan.prefetch_policy is not None:
            self.attach(plan.prefetch_policy)
        self._confirming = Confirming(tree, self.host)
        self.backup = Backup(plan.write_policy, tree, self.host, self.transfers, self._arrived, self._confirming)
        self.loads = Loads(plan.page_bytes, tree, self.host, self.transfers, self.reach, room)
        tree.seed = self.seed
        tree.watchers.append(self.backup)
        tree.rescuer = self.backup

    def seed(self, namespace: Namespace) -> bytes:
        """Return the seed of the keys of a namespace."""
        named = {"salt": namespace.salt, "adapter": namespace.adapter}
        return fingerprint({**named, "identity": self.plan.identity, "weights": self.weights})

    def keys(self, namespace: Namespace, tokens: Int32) -> KeyChain:
        """Return the keys of a sequence in `namespace`, which must be of the current weights."""
        return KeyChain(self.seed(namespace), tokens, self._tree.page_size)

    def attach(self, policy: PrefetchPolicy) -> None:
        """Add storage, which the mover can reach. It gets what the host has."""
        plan = self.plan
        self.storage = Storage(
            policy, plan.group_keys, plan.page_bytes, self._tree, self.host, self.transfers, self.reach
        )

    def detach(self) -> None:
        """Remove storage. Transfers in flight end as usual; nothing waits for them."""
        if self.storage is not None:
            self.storage.detach()
            self._confirming.forget()
        self.storage = None

    def _arrived(self, group: int, keys: Sequence[bytes]) -> None:
        if self.storage is not None:
            self.storage.enqueue(group, keys)

    def saving(self, namespace: Namespace, tokens: Int32) -> Saving:
        """Return an object that copies what device and host have of `tokens` [n] to the deepest tier."""
        keys = self.keys(namespace, tokens)
        return Saving(self._tree, self.host, self.reach, self.backup, self.storage, namespace, keys)

    def settle(self, now: float) -> None:
        """End transfers and begin backups; nothing else does. Called in every iteration before planning, even when
        nothing is computed. `now`: seconds of the scheduler's clock."""
        self.transfers.settle_all(now)
        for node in () if self.storage is None else self._confirming.go_on(self.storage, now):
            self.backup.look_again(node)
        self.backup.begin()
        if self.storage is not None:
            self.storage.begin()

    @property
    def has_work(self) -> bool:
        """Whether `settle` would make progress."""
        is_to_store = self.storage is not None and self.storage.has_news
        return bool(self.transfers.outcomes) or self.backup.has_news or is_to_store

    def returning(self) -> Int64:
        """Return device pages of each group that were evicted but are still being copied. Late copies have released
        theirs."""
        counts = np.array([len(self.backup.rescued_pages(group)) for group in range(len(self.host.pages))], np.int64)
        for transfer in self.transfers:
            if transfer.order.kind is Kind.BACKUP:
                counts += [len(part) for part in transfer.device]
        return counts

    @property
    def holds(self) -> list[Hold]:
        """The device holds of transfers."""
        return [transfer.hold for transfer in self.transfers if transfer.hold is not None]

    @property
    def hold_pages(self) -> bool:
        """Whether transfers that are not late own or pin pages of the device."""
        return any(
            (transfer.hold is not None or any(len(part) for part in transfer.device))
            and not self.transfers.is_late(transfer)
            for transfer in self.transfers
        )

    def device_pages(self, group: int) -> int:
        """Return how many device pages transfers own."""
        return len(self.backup.rescued_pages(group)) + sum(len(one.device[group]) for one in self.transfers)
