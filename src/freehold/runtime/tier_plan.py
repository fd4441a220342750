"""What a configuration asks for below the device: how much host memory, which storage, and the names of pages there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from freehold.config import EngineConfig
from freehold.contract.errors import InvalidParameter
from freehold.contract.prefix_keys import fingerprint
from freehold.engine.cpu.isa import choose
from freehold.engine.speculative.choice import open_draft
from freehold.memory import PrefetchPolicy, TierPlan, WritePolicy
from freehold.models.loading.content import content_fingerprint
from freehold.models.tensor import Checkpoint
from freehold.runtime.memory_plan import MemoryPlan
from freehold.store.breaker import Breaker
from freehold.store.location import kind_of, open_store
from freehold.store.store import Store, StoreUnavailable

FORMAT = 6  # of keys, of pages and of rounding; pages of another format are not found
CHECK_S = 5.0  # for a store to answer when it is attached
FOLDER = Path("~/.cache/freehold/kv")
PLACES = {"file": "a folder such as /var/cache/kv", "redis": "redis://127.0.0.1:6379/0", "s3": "s3://bucket/prefix"}
LEAST_PAGES = 4  # of storage: a folder is cut into four segments


def plan_tiers(config: EngineConfig, checkpoint: Checkpoint, plan: MemoryPlan) -> TierPlan | None:
    """None if there is only the device. Raises ValueError naming the option, or ModelUnavailable."""
    counts = check_tiers(config, plan)
    if counts is None:
        return None
    shape, sizes = plan.shape, plan.page_bytes
    names = tuple(
        fingerprint({"name": group.name, "lookback": str(group.lookback), "state": group.is_state, "bytes": size})
        for group, size in zip(shape.groups, sizes, strict=True)
    )
    policy = None if config.hicache_storage_backend is None else PrefetchPolicy(config.hicache_storage_prefetch_policy)
    identity = _identity(config, checkpoint)
    return TierPlan(counts, tuple(sizes), names, identity, WritePolicy(config.hicache_write_policy), policy)


def check_tiers(config: EngineConfig, plan: MemoryPlan) -> tuple[int, ...] | None:
    """-> the host's pages of each cache group, None if there is only the device. Opens and reads nothing. Raises
    ValueError naming the option that is wrong."""
    if not config.enable_hierarchical_cache:
        return None
    if config.disable_radix_cache:
        raise ValueError("enable_hierarchical_cache needs the prefix cache: leave out disable_radix_cache")
    shape, sizes = plan.shape, plan.page_bytes
    ratio = config.hicache_ratio
    if config.hicache_size:
        ratio = config.hicache_size / sum(count * size for count, size in zip(shape.page_counts, sizes, strict=True))
    counts = tuple(int(count * ratio) for count in shape.page_counts)
    if min(counts) < 1:
        option = "hicache_size" if config.hicache_size else "hicache_ratio"
        raise ValueError(f"{option}: too small for one page of each cache group ({sum(sizes)} bytes)")
    if config.hicache_storage_backend is not None:
        place_of(config.hicache_storage_backend, config.hicache_storage_location)
        check_capacity(config.hicache_storage_capacity, sizes)
    return counts


def _identity(config: EngineConfig, checkpoint: Checkpoint) -> bytes:
    """All that the bytes of a page depend on, but for its tokens, their namespace and the weights."""
    fields: dict[str, str | int | bytes] = {
        "format": FORMAT,
        "model": repr(checkpoint.spec),  # with its layers, their rotary embeddings and windows
        "kv": config.kv_cache_dtype,
        "layout": "tiles of 16, of all layers" if config.page_size % 16 == 0 else "slots",
        "page": config.page_size,
        "compute": config.linear_compute,
        "attention": _attention(config),
        "quantize": str(config.quantize),
        "rank": 0,
        "ranks": 1,
    }
    if config.speculative_algorithm == "draft":
        draft = open_draft(config, checkpoint)
        fields["draft"] = fingerprint({"spec": repr(draft.spec), "weights": content_fingerprint(draft.path)})
    return fingerprint(fields)


def _attention(config: EngineConfig) -> str:
    """In which order attention adds. One set of instructions has its own order, for KV in bfloat16 alone."""
    is_amx = choose(config.cpu_isa) == "amx" and config.kv_cache_dtype == "bfloat16"
    return "amx" if is_amx else "vectors"


def place_of(kind: str, location: str | None) -> str:
    """Where storage of that kind is: at `location`, or in the default folder. Raises InvalidParameter for a location of
    another kind."""
    if location is None and kind == "file":
        return str(FOLDER.expanduser())
    if location is None or kind_of(location) != kind:
        given = "nothing" if location is None else f"'{location}'"
        raise InvalidParameter("hicache_storage_location", f"expected {PLACES[kind]} for {kind}, not {given}")
    return location


def check_capacity(capacity_bytes: int, page_bytes: Sequence[int]) -> None:
    """Raise InvalidParameter for a capacity that would keep next to nothing. `page_bytes`: of each cache group."""
    least = LEAST_PAGES * sum(page_bytes)
    if capacity_bytes < least:
        message = f"must be at least {least} ({LEAST_PAGES} pages of each cache group), not {capacity_bytes}"
        raise InvalidParameter("hicache_storage_capacity", message)


def open_storage(location: str, capacity_bytes: int, must_answer: bool = True) -> Store:
    """Return a store behind a breaker, with tried settings. One that can't be used now is left to its breaker,
    unless it `must_answer`. Raises InvalidParameter or StoreUnavailable."""
    store = Breaker(partial(open_store, location, capacity_bytes))
    try:
        store.check(CHECK_S)
    except StoreUnavailable as error:
        if must_answer:
            store.close()
            raise
        print(f"freehold: {location} can't be used yet: {error}", file=sys.stderr, flush=True)
    except Exception as error:  # each library has errors of its own for a setting that it can't read
        store.close()
        message = str(error) if location in str(error) else f"{location}: {error}"
        raise InvalidParameter("hicache_storage_location", message) from error
    return store


def configured_storage(config: EngineConfig) -> Store | None:
    """Return the store of a configuration, or None. It need not answer yet. Raises what `place_of` and
    `open_storage` raise."""
    kind = config.hicache_storage_backend
    if kind is None:
        return None
    place = place_of(kind, config.hicache_storage_location)
    return open_storage(place, config.hicache_storage_capacity, must_answer=False)
