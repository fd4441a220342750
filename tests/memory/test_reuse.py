"""Eviction by what was learned of how long prefixes wait for their next use."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freehold.memory import Memory, MemoryShape
from freehold.memory.prefix.node import Namespace
from freehold.memory.prefix.reuse import BATCH, CLASSES, ReuseStatistics, class_of

SIZE = 4


def make(pages=64, policy="reuse", **options) -> Memory:
    return Memory(MemoryShape(pages, SIZE, 4, pages * SIZE, policy, **options))


def prompt(seed: int, pages: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, pages * SIZE).astype(np.int32)


def use(memory: Memory, tokens: np.ndarray, chunk: int | None = None) -> int:
    """Compute a prompt, published chunk by chunk -> tokens that were cached."""
    match = memory.tree.match(Namespace(), tokens)
    lease = memory.leases.open(match)
    lease.use()
    step = chunk or len(tokens)
    while lease.committed < len(tokens):
        count = min(step, len(tokens) - lease.committed)
        row = np.array([lease.row])
        assert memory.room.make(row, np.array([lease.committed + count]))
        lease.extend(count)
        lease.commit(count)
        lease.publish(tokens)
    lease.release()
    if memory.tree.page_count < 100:
        memory.audit()
    return match.length


def learn(statistics: ReuseStatistics, hits: int, end: int, reused: bool, times: int = BATCH) -> None:
    for _ in range(times):
        statistics.wait(hits, 0, end, 1, reused)


def test_without_experience_older_is_worth_less_whoever_it_is():
    statistics = ReuseStatistics()
    for hits in range(CLASSES):
        worth = [statistics.worth(hits, age) for age in (0, 3, 10, 100, 1000, 10**7)]
        assert worth == sorted(worth, reverse=True)
        assert len(set(worth)) == len(worth)
    assert class_of(99) == CLASSES - 1


def test_those_that_come_back_are_worth_more_than_younger_ones_that_do_not():
    statistics = ReuseStatistics()
    for _ in range(20):
        learn(statistics, 0, 400, reused=False)
        learn(statistics, 1, 50, reused=True)
    assert statistics.worth(1, 30) > 5 * statistics.worth(0, 5)
    # Nobody has come back after 50: by then it is worth less than while it may still come.
    assert statistics.worth(1, 40) > 2 * statistics.worth(1, 300)


def test_worth_is_hits_for_a_tick():
    """All come back at an age of 100."""
    statistics = ReuseStatistics()
    for _ in range(60):
        learn(statistics, 0, 100, reused=True)
    assert 0.5 / 100 < statistics.worth(0, 0) < 2 / 100
    assert statistics.worth(0, 90) > 2 * statistics.worth(0, 0)


def best_rate(reused: list[float], waited: list[float], first: int) -> float:
    """The most hits for a tick, of all buckets of age in which one may stop to keep a page that has reached `first`."""
    left, hits, ticks, best = 1.0, 0.0, 0.0, 0.0
    for bucket in range(first, 25):
        low, high = 2.0 ** (bucket - 1) if bucket else 0.0, 2.0**bucket
        rate = (reused[bucket] + 1) / (waited[bucket] + high)
        chance = 1 - math.exp(-rate * (high - low))
        hits, ticks, left = hits + left * chance, ticks + left * chance / rate, left * (1 - chance)
        best = max(best, hits / ticks)
    return best


@settings(max_examples=25)
@given(st.data())
def test_worth_is_the_best_rate_of_what_was_seen(data):
    """Counted one by one; what is older counts less with each batch."""
    waits = st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 300), st.integers(1, 9), st.booleans())
    statistics = ReuseStatistics()
    reused, waited = ([[0.0] * 25 for _ in range(4)] for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("freehold.memory.prefix.reuse.BATCH", 6)
        for _ in range(data.draw(st.integers(0, 3))):
            for counts in (*reused, *waited):
                counts[:] = [0.98 * count for count in counts]
            for hits, start, more, pages, is_reused in data.draw(st.lists(waits, min_size=6, max_size=6)):
                statistics.wait(hits, start, start + more, pages, is_reused)
                for bucket in range(25):
                    low, high = 2.0 ** (bucket - 1) if bucket else 0.0, 2.0**bucket
                    waited[min(hits, 3)][bucket] += max(min(start + more, high) - max(start, low), 0) * pages
                    reused[min(hits, 3)][bucket] += pages * (is_reused and low <= start + more < high)
    for hits in range(5):
        for bucket, age in enumerate([0, *(2**exponent for exponent in range(24))]):
            expected = best_rate(reused[min(hits, 3)], waited[min(hits, 3)], bucket)
            assert statistics.worth(hits, age) == pytest.approx(expected)
            assert statistics.worth(hits, max(2 * age - 1, 0)) == pytest.approx(expected), "the same bucket"


def test_what_was_learned_is_forgotten_when_the_world_changes():
    statistics = ReuseStatistics()
    for _ in range(100):
        learn(statistics, 0, 100, reused=True)
    before = statistics.worth(0, 50)
    for _ in range(300):
        learn(statistics, 0, 10**6, reused=False)
    assert statistics.worth(0, 50) < before / 20


def test_a_prefix_that_comes_back_is_recognised_in_all_its_pieces():
    """Evicted in pieces, computed again in chunks that end elsewhere."""
    memory = make()
    tokens = prompt(1, 30)
    use(memory, tokens)
    for pages in (3, 7, 1, 9, 10):
        memory.tree.evictor.evict(pages, "a test")
    assert memory.tree.page_count == 0
    waits: list[tuple] = []
    memory.tree.history.reuse.wait = lambda *wait: waits.append(wait)  # type: ignore[method-assign]
    assert use(memory, tokens, chunk=8 * SIZE) == 0
    assert sum(pages for *_, pages, reused in waits if reused) == 30
    (node,) = [node for node in memory.tree.nodes() if node.parent is not None]
    assert node.hits == 1


def test_a_branch_that_comes_back_is_recognised_behind_one_that_stayed():
    memory = make()
    common, one, two = prompt(1, 4), prompt(2, 3), prompt(3, 3)
    use(memory, np.concatenate([common, one]))
    use(memory, np.concatenate([common, two]))
    memory.tree.evictor.evict(3, "a test")  # the older branch
    assert use(memory, np.concatenate([common, two])) == 7 * SIZE
    assert use(memory, np.concatenate([common, one])) == 4 * SIZE
    leaves = {node.hits for node in memory.tree.nodes() if node.parent is not None and not node.children}
    assert leaves == {1}


def test_conversations_that_go_on_outlive_requests_that_never_come_back():
    """A conversation returns after 40 other requests, which take 5 times the memory: too long for lru."""

    def hit_rate(policy: str) -> float:
        memory = make(64, policy)
        hits = total = 0
        for i in range(3000):
            if i % 10 == 0:
                tokens = prompt(1_000_000 + i // 10 % 4, 8)
                hits += use(memory, tokens)
                total += len(tokens)
            else:
                use(memory, prompt(i, 8))
        return hits / total

    assert hit_rate("lru") == 0
    assert hit_rate("reuse") > 0.5


def test_a_hint_goes_before_what_was_learned():
    """Four prefixes: one is never hit, and hinted; the others are of the kind that comes back."""
    memory = make(20)
    for seed in (0, 1, 2, 3, 1, 2, 3):
        use(memory, prompt(seed, 4))
    for _ in range(20):
        learn(memory.tree.history.reuse, 0, 400, reused=False)
        learn(memory.tree.history.reuse, 1, 50, reused=True)
    hinted, *others = sorted((node for node in memory.tree.nodes() if node.parent is not None), key=lambda n: n.hits)
    assert [node.hits for node in (hinted, *others)] == [0, 1, 1, 1]
    hinted.level = 5
    memory.tree.evictor.evict(12, "a test")
    assert hinted.parent is not None
    assert [node.parent for node in others] == [None] * 3


def test_evictions_that_are_forgotten_leave_nothing_behind():
    """Each page has waited so long that its next account is far away."""
    memory = make(pages=3000)
    memory.tree.history.limit = 16
    for i in range(2000):
        use(memory, np.full(SIZE, i, np.int32))
    memory.tree.tick += 1_000_000
    for _ in range(2000):
        memory.tree.evictor.evict(1, "a test")
    assert len(memory.tree.history._due) == 16
