"""Size and layout of KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freehold.config import EngineConfig
from freehold.memory.group import CacheGroup, with_draft

PAGE_SIZES = (1, 2, 4, 16, 64, 256)


@dataclass(frozen=True)
class MemoryShape:
    """Size and layout of memory: `page_count` pages of each full group; bounded groups state their own. A step computes
    up to `step_tokens` of a row. Hints may retain at most `retained_share` of a full group's pages, and operators pin
    `pinned_share`. Tenants (salts) with more than `tenant_quota` of them are evicted first. A prompt's state is kept
    every `checkpoint_interval` tokens, unless that is 0. Raises ValueError for impossible values."""

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
    step_tokens: int = 512
    checkpoint_interval: int = 0

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size must be one of {PAGE_SIZES}, not {self.page_size}")
        if len(self.groups) == 0:
            raise ValueError("a model has at least one cache group")
        for name in ("tenant_quota", "retained_share", "pinned_share"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name} must be a share between 0 and 1, not {share}")
        if self.checkpoint_interval % self.page_size:
            raise ValueError(f"checkpoint_interval must be a multiple of {self.page_size}, the page size")
        for group, count, needed in zip(self.groups, self.page_counts, self.row_needs, strict=True):
            if count < needed:
                raise ValueError(f"cache group {group.name}: {count} pages, but one row needs {needed}")

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        page_count: int,
        token_limit: int,
        spare_rows: int = 0,
        groups: Sequence[CacheGroup] = (CacheGroup(),),
    ) -> MemoryShape:
        """Return the shape that the options ask for, for a model with these groups."""
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
            groups=with_draft(groups) if config.speculative_algorithm == "draft" else groups,
            step_tokens=config.chunked_prefill_size,
            checkpoint_interval=config.checkpoint_interval,
        )

    @property
    def page_counts(self) -> list[int]:
        """Pages of each group."""
        return [self.page_count if group.page_count is None else group.page_count for group in self.groups]

    @property
    def row_needs(self) -> list[int]:
        """Pages of each group that a row may need at any length: one of full groups, the most it ever holds of bounded
        ones."""
        columns = -(-self.token_limit // self.page_size)
        return [
            min(group.pages_of_a_row(self.page_size, self.step_tokens, self.checkpoint_interval), columns)
            if group.is_bounded
            else 1
            for group in self.groups
        ]

    @property
    def has_full_groups(self) -> bool:
        """Whether any group is full. Without one, only rows and their states limit what runs, not the number of
        tokens."""
        return not all(group.is_bounded for group in self.groups)

    def pages(self, share: float) -> int:
        return int(share * self.page_count)
