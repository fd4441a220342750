"""Page ownership. Plain Python and NumPy: no model is needed to run, test or simulate it."""

from freehold.memory.counts import PageCounts
from freehold.memory.explain import Miss
from freehold.memory.group import CacheGroup, with_draft
from freehold.memory.hit import Hit
from freehold.memory.lease import Lease
from freehold.memory.lease_table import LeaseTable
from freehold.memory.ledger.errors import AuditError, BrokenInvariant, LeaseError, OutOfPages, OwnershipError
from freehold.memory.ledger.pool import PagePool, Tier
from freehold.memory.memory import Memory
from freehold.memory.prefix.node import Match, Namespace, PinKind
from freehold.memory.prefix.pins import PinnedPrefix, PinRefused, PinTable
from freehold.memory.prefix.retention import Retention
from freehold.memory.prefix.tree import PrefixTree
from freehold.memory.shape import PAGE_SIZES, MemoryShape
from freehold.memory.tiers.backup import WritePolicy
from freehold.memory.tiers.saving import Saved
from freehold.memory.tiers.storage import PrefetchPolicy
from freehold.memory.tiers.tiers import TierPlan

__all__ = [
    "PAGE_SIZES", "AuditError", "BrokenInvariant", "CacheGroup", "Hit", "Lease", "LeaseError", "LeaseTable", "Match",
    "Memory", "MemoryShape", "Miss", "Namespace", "OutOfPages", "OwnershipError", "PageCounts", "PagePool", "PinKind",
    "PinRefused", "PinTable", "PinnedPrefix", "PrefetchPolicy", "PrefixTree", "Retention", "Saved", "Tier", "TierPlan",
    "WritePolicy", "with_draft",
]  # fmt: skip
