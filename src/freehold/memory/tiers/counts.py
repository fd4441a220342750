"""Counters of the tiers, for metrics and operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from freehold.contract.orders import Kind
from freehold.memory.tiers.tiers import Tiers
from freehold.memory.tiers.transfer import TransferCounts


@dataclass(frozen=True)
class TierCounts:
    """`host_pages` of each group by owner, `moved_pages` by the kind of transfer, `lost_pages` by reason,
    `queued_pages` by what they wait for, `transfers` by kind."""

    host_pages: dict[str, dict[str, int]]
    moved_pages: dict[str, int]
    lost_pages: dict[str, int]
    queued_pages: dict[str, int]
    transfers: dict[str, TransferCounts]


def count_tiers(tiers: Tiers) -> TierCounts:
    """Return all counts since startup."""
    storage, backup, host = tiers.storage, tiers.backup, tiers.host
    flying = Counter(transfer.order.kind for transfer in tiers.transfers)
    for kind, counts in tiers.transfers.counts.items():
        counts.in_flight = flying[kind]
    return TierCounts(
        host_pages={
            group.name: {
                "capacity": pages.pool.capacity,
                "free": pages.pool.free_count,
                "mirror": pages.mirror_count,
                "alone": len(pages) - pages.mirror_count,
                "transfer": pages.pool.held_count - len(pages),
            }
            for group, pages in zip(host.groups, host.pages, strict=True)
        },
        moved_pages={
            Kind.BACKUP.value: backup.written,
            Kind.LOAD.value: tiers.loads.loaded_pages,
            Kind.STORE.value: 0 if storage is None else storage.stored,
            Kind.FETCH.value: 0 if storage is None else storage.fetched,
        },
        lost_pages={
            "host_full": backup.dropped,
            "abandoned": backup.abandoned,
            "not_stored": 0 if storage is None else storage.dropped,
            "host_evicted": sum(pages.evicted_count for pages in host.pages),
        },
        queued_pages={
            Kind.BACKUP.value: backup.queued_pages,
            Kind.STORE.value: 0 if storage is None else storage.queued_pages,
        },
        transfers={kind.value: counts for kind, counts in tiers.transfers.counts.items()},
    )


def describe_tiers(tiers: Tiers) -> dict[str, Any]:
    """Return the counts, with the ages of host pages in steps when loaded and when evicted."""
    ages = {
        group.name: pages.ages.as_dict()
        for group, pages in zip(tiers.host.groups, tiers.host.pages, strict=True)
    }  # fmt: skip
    return {**asdict(count_tiers(tiers)), "host_page_ages_in_steps": ages}
