"""The cost of the prefix tree, ledger included."""

from __future__ import annotations

import time

import numpy as np

from freehold.contract.arrays import Int32
from freehold.memory import CacheGroup, Lease, Memory, MemoryShape


def _prompt(tokens: int, seed: int = 0) -> Int32:
    return np.random.default_rng(seed).integers(0, 50_000, tokens).astype(np.int32)


def three_groups(tokens: int, page_size: int) -> tuple[CacheGroup, ...]:
    """Return full attention, a window of 512 and states, with room for the whole prompt."""
    pages = tokens // page_size + 8
    return CacheGroup(), CacheGroup("window", 511, page_count=pages), CacheGroup("states", 1, True, pages)


def _memory(tokens: int, page_size: int, groups: tuple[CacheGroup, ...] = (CacheGroup(),)) -> Memory:
    pages = tokens // page_size + 8
    return Memory(MemoryShape(pages, page_size, 2, tokens + page_size, groups=groups, step_tokens=tokens))


def _computed(memory: Memory, prompt: Int32, tokens: int) -> Lease:
    """Return a lease on a computed prompt that was not cached."""
    lease = memory.leases.open(memory.match("", prompt))
    lease.extend(tokens)
    lease.commit(tokens)
    return lease


def prefix_match_us(
    tokens: int, repeats: int = 200, page_size: int = 16, groups: tuple[CacheGroup, ...] = (CacheGroup(),)
) -> float:
    """Return median microseconds to match a cached prompt, lease its pages and release them."""
    memory, prompt = _memory(tokens, page_size, groups), _prompt(tokens + 1)
    lease = _computed(memory, prompt, tokens)
    lease.publish(prompt)
    lease.release()
    times: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        lease = memory.leases.open(memory.match("", prompt))
        lease.use()
        lease.release()
        times.append(time.perf_counter() - started)
        memory.leases.page_tables.take_updates()
    return float(np.median(times)) * 1e6


def publish_us(tokens: int, repeats: int = 50, page_size: int = 16) -> float:
    """Return median microseconds to publish a computed, uncached prompt to the tree."""
    memory, times = _memory(tokens, page_size), []
    for i in range(repeats):
        prompt = _prompt(tokens, i)
        lease = _computed(memory, prompt, tokens)
        started = time.perf_counter()
        lease.publish(prompt)
        times.append(time.perf_counter() - started)
        lease.release()
        memory.flush()
        memory.leases.page_tables.take_updates()
    return float(np.median(times)) * 1e6


def evict_us(leaves: int, leaf_pages: int, page_size: int = 16, together: int = 1024, repeats: int = 10) -> float:
    """Return median microseconds per page to evict `together` pages from a tree of `leaves` leaves."""
    size = leaf_pages * page_size
    memory = Memory(MemoryShape(leaves * leaf_pages, page_size, 1, size))
    for first in range(leaves):
        prompt = np.full(size, first, np.int32)
        lease = _computed(memory, prompt, size)
        lease.publish(prompt)
        lease.release()
    times: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        memory.tree.evictor.evict(together, "a measurement")
        times.append(time.perf_counter() - started)
    return float(np.median(times)) / together * 1e6
