"""How much KV memory there is and how it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freehold.config import EngineConfig
from freehold.memory.group import CacheGroup, cache_groups

PAGE_SIZES = (1, 2, 4, 16, 64, 256)


@dataclass(frozen=True)
class MemoryShape:
    """How much memory there is and how it is cut. Of the pool, hints may retain `retained_share` at most and
    operators pin `pinned_share`; tenants (salts) that have cached more than `tenant_quota` of it give first.
    Raises ValueError for what cannot work."""

    page_count: int
    page_size: int = 16
    row_count: int = 256
    token_limit: int = 8192
    eviction_policy: str = "reuse"
    prefix_cache: bool = True
    tenant_quota: float | None = None
    retained_share: float = 0.5
    pinned_share: float = 0.25
    groups: Sequence[CacheGroup] = (CacheGroup(),)

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size must be one of {PAGE_SIZES}, not {self.page_size}")
        if len(self.groups) == 0:
            raise ValueError("a model has at least one cache group")
        for name in ("tenant_quota", "retained_share", "pinned_share"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name} must be a share between 0 and 1, not {share}")

    @classmethod
    def of(cls, config: EngineConfig, page_count: int, token_limit: int, spare_rows: int = 0) -> MemoryShape:
        """What the options ask for."""
        return cls(
            page_count=page_count,
            page_size=config.page_size,
            row_count=config.max_running_requests + spare_rows,
            token_limit=token_limit,
            eviction_policy=config.eviction_policy,
            prefix_cache=not config.disable_radix_cache,
            tenant_quota=config.cache_tenant_quota,
            retained_share=config.cache_retained_share,
            pinned_share=config.cache_pinned_share,
            groups=cache_groups(config.speculative_algorithm == "draft"),
        )

    def pages(self, share: float) -> int:
        return int(share * self.page_count)
