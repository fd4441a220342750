"""What eviction looks at grows with the logarithm of what is cached, whatever is retained, pinned or over its quota."""

import sys
from types import FrameType

import numpy as np
import pytest

from freehold.memory import CacheGroup, Memory, MemoryShape, Namespace, Retention
from freehold.memory.ledger import owner

SIZES = [(100, 10_000), pytest.param((1_000, 100_000), marks=pytest.mark.load)]
EVICTED = 8  # pages at a time
FULL = CacheGroup()
KINDS = {
    "full": (FULL,),
    "window": (CacheGroup("window", lookback=7, page_count=0),),
    "full and window": (FULL, CacheGroup("window", lookback=7, page_count=0)),
    "states": (CacheGroup("state", lookback=1, is_state=True, page_count=0),),
}


def lines_in_memory(call) -> int:
    """Lines of the memory layer that run: every turn of every loop in it counts."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object):
        nonlocal count
        if "/freehold/memory/" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def filled(groups, count: int, quota: float | None, hints: bool) -> Memory:
    """So many prefixes of one page each, under one root or of many tenants; with `hints` nearly all are retained."""
    sized = tuple(
        CacheGroup(one.name, one.lookback, one.is_state, count + 100 if one.is_bounded else None) for one in groups
    )
    shape = MemoryShape(
        count + 100, 4, 4, 64, groups=sized, step_tokens=4, tenant_quota=quota, retained_share=1.0, pinned_share=1.0
    )
    memory = Memory(shape)
    by = owner.transfer(1)
    pages = [pool.allocate(np.full(count, by, np.int64)) for pool in memory.pools]
    tokens = np.arange(4 * count, dtype=np.int32).reshape(count, 4)
    for i in range(count):
        root = memory.tree.root(Namespace(f"tenant {i % 50}" if quota is not None else ""))
        node, _ = memory.tree.insert(root, tokens[i], [part[i : i + 1] for part in pages], by)
        if hints and i % 100:
            memory.tree.hints.retain(node, Retention(1 + i % 50), 0.0)
        if i % (count // 20) == 0:
            memory.pin(f"pin {i}", node.namespace.salt, tokens[i], None)
    return memory


@pytest.mark.sampled(6)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("quota", [None, 0.001], ids=["", "quota"])
@pytest.mark.parametrize("hints", [False, True], ids=["", "hints"])
@pytest.mark.parametrize("kind", KINDS)
def test_eviction_of_a_few_pages_looks_at_a_few(kind, hints, quota, sizes):
    costs = []
    for count in sizes:
        memory = filled(KINDS[kind], count, quota, hints)
        evicted = []
        for _ in range(3):  # the first call may meet what was queued and is pinned
            need = [pool.free_count + EVICTED for pool in memory.pools]
            evicted.append(lines_in_memory(lambda need=need, memory=memory: memory.room.make_for(need)))
            for pool, count_now in zip(memory.pools, need, strict=True):
                assert pool.free_count >= count_now, "eviction did not give what it could"
        costs.append(min(evicted))
        if count < 5_000:
            memory.audit()
    few, many = costs
    assert many < 2 * few + 200, f"{few} and {many} lines for {EVICTED} pages of {sizes}"
