"""The engine's start-up options."""

from __future__ import annotations

from dataclasses import dataclass

from freehold.options import Limits, check_limits, option

SCHEDULE_POLICIES = ("fcfs", "lpm", "priority")
SPECULATIVE_ALGORITHMS = ("ngram", "draft")
QUANTIZED = ("q8_0", "q4_1", "q4_k")
LINEAR_COMPUTE = ("float32", "int16", "int8")
KV_CACHE_DTYPES = ("float32", "bfloat16", "int8")
EVICTION_POLICIES = ("reuse", "lru", "lfu", "fifo", "priority")
KV_BYTES_DEFAULT = 1 << 30
WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
FORCED_MAX = 8
GRAMMAR_BACKENDS = ("llguidance", "none")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
CPU_ISAS = ("auto", "amx", "avx512-bf16", "avx512-vnni", "avx-vnni", "avx2", "neon", "portable")
STORAGE_BACKENDS = ("file", "redis", "s3")
STORAGE_BYTES_DEFAULT = 64 << 30

MODEL, MEMORY, SCHEDULING = "Model", "Memory", "Scheduling"
SESSIONS_AND_CACHE, DEEPER_CACHE = "Sessions and cache", "Host memory and storage"
SPECULATION, DEVICES = "Speculation", "Devices"
STRUCTURED_OUTPUT, ADAPTERS = "Constrained output", "Adapters"

_POSITIVE = Limits(least=1)
_SHARE = Limits(least=0, most=1)
_SECONDS = Limits(above=0)


@dataclass(frozen=True)
class EngineConfig:
    """Options of `freehold serve` and `freehold.LLM`, named as the flags; `freehold serve --help` explains them. Raises
    ValueError naming the option."""

    model: str | None = option(
        None, "A GGUF file, a Hugging Face directory or a hub id. Default: SmolLM2-135M, fetched once.", MODEL
    )
    max_model_len: int | None = option(
        None, "Tokens of prompt and output together. Default: the model's.", MODEL, _POSITIVE,
        flags=("--context-length",),
    )  # fmt: skip
    chat_template: str | None = option(None, "File with a Jinja chat template, in place of the model's own.", MODEL)
    linear_compute: str = option(
        "int16", "Type that inputs of quantized weights are rounded to: int16, int8, or float32 (no rounding).", MODEL,
        Limits(choices=LINEAR_COMPUTE),
    )  # fmt: skip
    quantize: str | None = option(
        None, "Quantize float weights while loading: q8_0, q4_1 or q4_k. Default: none.", MODEL,
        Limits(choices=QUANTIZED),
    )  # fmt: skip
    page_size: int = option(16, "Tokens in a page.", MEMORY, _POSITIVE, flags=("--block-size",))
    num_pages: int | None = option(
        None, "Pages of KV memory. Default: as many as --kv-cache-memory-bytes holds.", MEMORY, _POSITIVE
    )
    kv_cache_memory_bytes: int = option(
        KV_BYTES_DEFAULT,
        "Bytes of KV memory, such as 8GB. Ignored if --num-pages is given.",
        MEMORY,
        is_size=True,
    )
    kv_cache_dtype: str = option(
        "bfloat16", "Type of stored keys and values: float32, bfloat16, or int8 (with scales).", MEMORY,
        Limits(choices=KV_CACHE_DTYPES),
    )  # fmt: skip
    audit_interval: int = option(
        0, "Audit all pages every k steps. 0: only when the engine is idle.", MEMORY, Limits(least=0)
    )
    max_running_requests: int = option(
        64, "Maximum number of running requests.", SCHEDULING, _POSITIVE, flags=("--max-num-seqs",)
    )
    max_queued_requests: int = option(
        4096, "Maximum number of waiting requests. Further ones get HTTP 503.", SCHEDULING, _POSITIVE
    )
    chunked_prefill_size: int = option(512, "Maximum number of prompt tokens in a step.", SCHEDULING, _POSITIVE)
    target_itl_ms: float | None = option(
        None, "Target inter-token latency in milliseconds. Prompt chunks are made smaller to meet it.", SCHEDULING,
        _SECONDS,
    )  # fmt: skip
    schedule_policy: str = option(
        "fcfs", "Order of waiting requests: fcfs, lpm (longest prefix match) or priority.", SCHEDULING,
        Limits(choices=SCHEDULE_POLICIES),
    )  # fmt: skip
    max_overtaken: int = option(
        64, "Maximum number of later requests admitted ahead of a waiting one.", SCHEDULING,
        _POSITIVE,
    )  # fmt: skip
    fair_decode_rows: int | None = option(
        None, "Rows each client may decode in every step under any load. Default: learned.",
        SCHEDULING, _POSITIVE,
    )  # fmt: skip
    priority_scheduling_preemption_threshold: int | None = option(
        None, "With --schedule-policy priority: minimum priority difference for preemption.",
        SCHEDULING, _POSITIVE,
    )  # fmt: skip
    stream_interval: int = option(
        1, "Tokens per streamed chunk after the first. More reduces overhead.", SCHEDULING, _POSITIVE
    )
    stream_hold_ms: float | None = option(
        None, "Milliseconds a token may be held to be sent with later ones; first tokens and ends are never held. "
        "Default: 10 if the kernels use all cores, else 0.", SCHEDULING, Limits(least=0),
    )  # fmt: skip
    disable_overlap_schedule: bool = option(False, "Plan each step only after the previous one ended.", SCHEDULING)
    request_timeout: float | None = option(None, "Seconds after which a request times out.", SCHEDULING, _SECONDS)
    waiting_timeout: float | None = option(
        None, "Maximum seconds a request waits to be scheduled.", SCHEDULING, _SECONDS
    )
    running_timeout: float | None = option(None, "Maximum seconds a scheduled request runs.", SCHEDULING, _SECONDS)
    watchdog_timeout: float = option(300.0, "Seconds after which a step counts as hung.", SCHEDULING, _SECONDS)
    forward_retract_interval: int = option(
        0, "For tests: retract a running request every k steps.", SCHEDULING, Limits(least=0)
    )
    disable_radix_cache: bool = option(False, "Cache no prefixes for later requests.", SESSIONS_AND_CACHE)
    eviction_policy: str = option(
        "reuse", "Which cached pages are evicted first: reuse (learned), lru, lfu, fifo or priority.",
        SESSIONS_AND_CACHE, Limits(choices=EVICTION_POLICIES), flags=("--radix-eviction-policy",),
    )  # fmt: skip
    checkpoint_interval: int = option(
        0, "Checkpoint recurrent state every so many prompt tokens. A multiple of the "
        "page size; 0: only where prompts end or branch.", SESSIONS_AND_CACHE, Limits(least=0),
    )  # fmt: skip
    cache_tenant_quota: float | None = option(
        None, "Share of the pool per tenant (cache_salt). Evict tenants above it first.", SESSIONS_AND_CACHE, _SHARE
    )
    cache_retained_share: float = option(
        0.5, "Share of the pool that clients' hints may retain.", SESSIONS_AND_CACHE, _SHARE
    )
    cache_pinned_share: float = option(0.25, "Share of the pool that operators may pin.", SESSIONS_AND_CACHE, _SHARE)
    enable_hierarchical_cache: bool = option(False, "Also cache prefixes in host memory.", DEEPER_CACHE)
    hicache_ratio: float = option(
        2.0, "Host memory for KV, as a multiple of the device's.", DEEPER_CACHE, Limits(above=0)
    )
    hicache_size: int = option(
        0, "Bytes of host memory for KV, such as 8GB. 0: --hicache-ratio decides.", DEEPER_CACHE, is_size=True
    )
    hicache_write_policy: str = option(
        "write_through", "When prefixes are copied to the host: write_through (at once), write_through_selective (when "
        "they are used again) or write_back (when they are evicted).", DEEPER_CACHE, Limits(choices=WRITE_POLICIES),
    )  # fmt: skip
    hicache_storage_backend: str | None = option(
        None, "Storage tier below host memory: file, redis or s3. Cached prefixes survive a restart.", DEEPER_CACHE,
        Limits(choices=STORAGE_BACKENDS),
    )  # fmt: skip
    hicache_storage_location: str | None = option(
        None, "A folder, redis://host:port/0 or s3://bucket/prefix. Default for file: ~/.cache/freehold/kv.",
        DEEPER_CACHE,
    )  # fmt: skip
    hicache_storage_capacity: int = option(
        STORAGE_BYTES_DEFAULT, "Bytes of storage, such as 64GB.", DEEPER_CACHE, is_size=True
    )
    hicache_storage_prefetch_policy: str = option(
        "timeout", "How long a request waits for storage: best_effort (not at all), wait_complete, or timeout (a "
        "second).", DEEPER_CACHE, Limits(choices=PREFETCH_POLICIES),
    )  # fmt: skip
    kv_events_config: str | None = option(
        None, "Publish blocks stored in and removed from the cache, as vLLM does: JSON with enable_kv_cache_events, "
        "endpoint, replay_endpoint, topic.", DEEPER_CACHE,
    )  # fmt: skip
    grammar_backend: str = option(
        "llguidance", "Grammar engine for constrained output: llguidance, or none.", STRUCTURED_OUTPUT,
        Limits(choices=GRAMMAR_BACKENDS),
    )  # fmt: skip
    grammar_compile_timeout: float = option(
        5.0, "Maximum CPU seconds to compile a grammar.", STRUCTURED_OUTPUT, Limits(above=0)
    )
    grammar_cache_bytes: int = option(
        64 << 20, "Size of the cache of compiled grammars, such as 64MB.", STRUCTURED_OUTPUT, is_size=True
    )
    disable_forced_tokens: bool = option(False, "Compute tokens forced by a grammar one at a time.", STRUCTURED_OUTPUT)
    enable_lora: bool = option(False, "Allow loading LoRA adapters at run time. --lora-modules implies it.", ADAPTERS)
    lora_modules: tuple[str, ...] = option(
        (), "LoRA adapter to load, as name=folder; clients select it as the model. Repeatable.", ADAPTERS
    )
    max_loras: int = option(8, "Maximum number of loaded adapters.", ADAPTERS, _POSITIVE)
    speculative_algorithm: str | None = option(
        None, "ngram (prompt lookup) or draft (a second, smaller model).", SPECULATION,
        Limits(choices=SPECULATIVE_ALGORITHMS),
    )  # fmt: skip
    speculative_num_draft_tokens: int = option(
        8, "Maximum number of draft tokens for a request in a step.", SPECULATION, Limits(least=1, most=64)
    )
    speculative_draft_model_path: str | None = option(None, "The draft model. Default: the model itself.", SPECULATION)
    speculative_draft_layers: int | None = option(
        None, "Draft with only the first layers of the draft model.", SPECULATION, _POSITIVE
    )
    cpu_isa: str = option(
        "auto",
        "Instruction set of the kernels: auto (best available), amx, avx512-bf16, avx512-vnni, avx-vnni, avx2, neon, "
        "portable. Integer products and attention are bit-identical on all, except amx attention with bfloat16 KV, "
        "which adds in another order.",
        DEVICES, Limits(choices=CPU_ISAS),
    )  # fmt: skip
    num_threads: int | None = option(None, "Kernel threads. Default: one per core.", DEVICES, _POSITIVE)

    @property
    def forced_limit(self) -> int:
        """Return the maximum number of tokens forced by a grammar that one step verifies."""
        return 0 if self.grammar_backend == "none" or self.disable_forced_tokens else FORCED_MAX

    @property
    def adapts(self) -> bool:
        """Return whether adapters may be loaded."""
        return self.enable_lora or bool(self.lora_modules)

    @property
    def adapter_paths(self) -> dict[str, str]:
        """Adapters to load at start: name to folder."""
        return dict(module.split("=", 1) for module in self.lora_modules)

    def __post_init__(self) -> None:
        check_limits(self)
        for module in self.lora_modules:
            name, separator, path = module.partition("=")
            if not (name and separator and path):
                raise ValueError(f"lora_modules: must be name=folder, not '{module}'")
        if len(self.adapter_paths) < len(self.lora_modules):
            raise ValueError("lora_modules: a name is repeated")
        if len(self.lora_modules) > self.max_loras:
            raise ValueError(f"lora_modules: {len(self.lora_modules)} adapters, max_loras is {self.max_loras}")
        if self.priority_scheduling_preemption_threshold is not None and self.schedule_policy != "priority":
            raise ValueError("priority_scheduling_preemption_threshold needs schedule_policy 'priority'")
        if self.hicache_storage_backend is not None and not self.enable_hierarchical_cache:
            raise ValueError("hicache_storage_backend needs enable_hierarchical_cache: pages pass through the host")
        if self.hicache_storage_location is not None and self.hicache_storage_backend is None:
            raise ValueError("hicache_storage_location needs hicache_storage_backend: file, redis or s3")
