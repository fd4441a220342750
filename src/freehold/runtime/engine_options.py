"""The options of `EngineConfig` but for the model, as keyword arguments of `LLM` and `AsyncEngine`. A test compares
the two."""

from __future__ import annotations

from typing import TypedDict


class EngineOptions(TypedDict, total=False):
    """`freehold serve --help` explains each."""

    max_model_len: int | None
    chat_template: str | None
    linear_compute: str
    quantize: str | None
    page_size: int
    num_pages: int | None
    kv_cache_memory_bytes: int
    kv_cache_dtype: str
    audit_interval: int
    max_running_requests: int
    max_queued_requests: int
    chunked_prefill_size: int
    target_itl_ms: float | None
    schedule_policy: str
    max_overtaken: int
    fair_decode_rows: int | None
    priority_scheduling_preemption_threshold: int | None
    stream_interval: int
    stream_hold_ms: float | None
    disable_overlap_schedule: bool
    request_timeout: float | None
    waiting_timeout: float | None
    running_timeout: float | None
    watchdog_timeout: float
    forward_retract_interval: int
    disable_radix_cache: bool
    eviction_policy: str
    checkpoint_interval: int
    cache_tenant_quota: float | None
    cache_retained_share: float
    cache_pinned_share: float
    enable_hierarchical_cache: bool
    hicache_ratio: float
    hicache_size: int
    hicache_write_policy: str
    hicache_storage_backend: str | None
    hicache_storage_location: str | None
    hicache_storage_capacity: int
    hicache_storage_prefetch_policy: str
    kv_events_config: str | None
    grammar_backend: str
    grammar_compile_timeout: float
    grammar_cache_bytes: int
    disable_forced_tokens: bool
    enable_lora: bool
    lora_modules: tuple[str, ...]
    max_loras: int
    speculative_algorithm: str | None
    speculative_num_draft_tokens: int
    speculative_draft_model_path: str | None
    speculative_draft_layers: int | None
    cpu_isa: str
    num_threads: int | None
