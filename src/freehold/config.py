"""Everything that can be chosen at start-up, in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass

SCHEDULE_POLICIES = ("fcfs", "lpm", "priority")
SPECULATIVE_ALGORITHMS = ("ngram", "draft")
LINEAR_COMPUTE = ("float32", "int16", "int8")
KV_CACHE_DTYPES = ("float32", "bfloat16", "int8")
EVICTION_POLICIES = ("reuse", "lru", "lfu", "fifo", "priority")
KV_BYTES_DEFAULT = 1 << 30


@dataclass(frozen=True)
class EngineConfig:
    """Options of `freehold serve` and `freehold.LLM`; the names are those of the flags.

    `num_pages` None sizes the pool to `kv_cache_memory_bytes`. `max_model_len` None takes the model's,
    cut to what the pool holds. `audit_interval` k audits memory after every k-th step (0: only at idle).
    `forward_retract_interval` k retracts a running request every k steps: a test switch.
    `max_overtaken`: so many later requests may be admitted before one that waits; then it goes first (lpm), and waits
    for no prefix that another request computes.
    `priority_scheduling_preemption_threshold` k lets a waiting request take the place of running ones whose
    priority is lower by at least k. `request_timeout` ends requests after so many seconds, `waiting_timeout`
    those that wait so long to be scheduled, `running_timeout` those that run so long; `watchdog_timeout` gives
    up on a step. Hints may retain `cache_retained_share` of the pool, operators pin `cache_pinned_share`;
    tenants (salts) whose prefixes fill more than `cache_tenant_quota` of it are evicted first.
    `linear_compute` is what inputs of weights of four and eight bits are rounded to for products in integers: int16,
    int8, or float32 for not at all. `kv_cache_dtype` is what keys and values are kept as; int8 has a scale for each
    position and head.
    `target_itl_ms`: prompts get no more of a step than lets decoding requests have a token so often.
    `speculative_algorithm` is ngram (prompt lookup) or draft (a second model: `speculative_draft_model_path`,
    the model itself by default, cut to its first `speculative_draft_layers`).
    Raises ValueError naming the option.
    """

    model: str | None = None
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_memory_bytes: int = KV_BYTES_DEFAULT
    max_model_len: int | None = None
    max_running_requests: int = 64
    max_queued_requests: int = 4096
    chunked_prefill_size: int = 512
    target_itl_ms: float | None = None
    schedule_policy: str = "fcfs"
    max_overtaken: int = 64
    eviction_policy: str = "reuse"
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    audit_interval: int = 0
    forward_retract_interval: int = 0
    cache_tenant_quota: float | None = None
    cache_retained_share: float = 0.5
    cache_pinned_share: float = 0.25
    linear_compute: str = "int16"
    kv_cache_dtype: str = "bfloat16"
    num_threads: int | None = None
    priority_scheduling_preemption_threshold: int | None = None
    request_timeout: float | None = None
    waiting_timeout: float | None = None
    running_timeout: float | None = None
    watchdog_timeout: float = 300.0
    speculative_algorithm: str | None = None
    speculative_num_draft_tokens: int = 8
    speculative_draft_model_path: str | None = None
    speculative_draft_layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("chunked_prefill_size", "max_running_requests", "max_queued_requests", "max_overtaken"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("num_pages", "max_model_len", "num_threads", "speculative_draft_layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.schedule_policy not in SCHEDULE_POLICIES:
            raise ValueError(f"schedule_policy must be one of {SCHEDULE_POLICIES}, not '{self.schedule_policy}'")
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ValueError(f"eviction_policy must be one of {EVICTION_POLICIES}, not '{self.eviction_policy}'")
        if self.linear_compute not in LINEAR_COMPUTE:
            raise ValueError(f"linear_compute must be one of {LINEAR_COMPUTE}, not '{self.linear_compute}'")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype must be one of {KV_CACHE_DTYPES}, not '{self.kv_cache_dtype}'")
        if self.speculative_algorithm not in (None, *SPECULATIVE_ALGORITHMS):
            raise ValueError(
                f"speculative_algorithm must be one of {SPECULATIVE_ALGORITHMS}, not '{self.speculative_algorithm}'"
            )
        if not 1 <= self.speculative_num_draft_tokens <= 64:
            raise ValueError(
                f"speculative_num_draft_tokens must be between 1 and 64, not {self.speculative_num_draft_tokens}"
            )
        for name in ("cache_tenant_quota", "cache_retained_share", "cache_pinned_share"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be a share between 0 and 1, not {value}")
        for name in ("request_timeout", "waiting_timeout", "running_timeout", "watchdog_timeout", "target_itl_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, not {value}")
        threshold = self.priority_scheduling_preemption_threshold
        if threshold is not None and (threshold < 1 or self.schedule_policy != "priority"):
            raise ValueError(
                "priority_scheduling_preemption_threshold must be at least 1, with schedule_policy 'priority'"
            )
