"""Eviction alone, on small traces where the answer can be seen."""

from dataclasses import replace

import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.planning.evictions import hit_rates
from freehold.planning.replay import Speed, replay
from freehold.planning.trace import Arrival


def arrivals(*prompts: str) -> list[Arrival]:
    """A letter is a page of four tokens."""
    return [
        Arrival(float(i), np.repeat(np.frombuffer(prompt.encode(), np.uint8), 4).astype(np.int32), 1)
        for i, prompt in enumerate(prompts)
    ]


def test_a_loop_that_is_one_page_too_long_defeats_lru_but_not_the_optimum():
    rates = hit_rates(arrivals(*"abcabcabcabc"), 4, 2, ["lru", "fifo"])
    assert rates["lru"] == rates["fifo"] == 0
    # After a, b: the page that comes back last makes room, so every other request finds its own.
    assert rates["optimum"] == 5 / 12


def test_what_was_hit_often_is_kept_by_lfu():
    trace = arrivals(*"aaabcdabcd")
    rates = hit_rates(trace, 4, 2, ["lru", "lfu"])
    assert rates["lru"] == 2 / 10
    assert rates["lfu"] == 3 / 10


def test_only_leaves_are_evicted_and_a_page_is_its_whole_prefix():
    rates = hit_rates(arrivals("xy", "zy", "xy"), 4, 4, ["lru"])
    assert rates["lru"] == 2 / 6, "the y after z is another page"
    assert hit_rates(arrivals("abc", "abd", "ab"), 4, 3, ["lru"])["lru"] == 4 / 8


def test_the_optimum_is_what_trying_everything_finds_where_nothing_is_shared():
    """Belady's choice is optimal for pages that are each a request of its own."""

    def best(trace: str, capacity: int) -> int:
        states = {frozenset(): 0}
        for page in trace:
            following: dict[frozenset, int] = {}
            for cached, hits in states.items():
                choices = [cached] if page in cached else [(cached - {gone}) | {page} for gone in cached]
                if page not in cached and len(cached) < capacity:
                    choices = [cached | {page}]
                for choice in choices:
                    following[choice] = max(following.get(choice, 0), hits + (page in cached))
            states = following
        return max(states.values())

    rng = np.random.default_rng(3)
    for _ in range(20):
        trace = "".join(chr(97 + int(n)) for n in rng.integers(0, 7, 40))
        assert round(hit_rates(arrivals(*trace), 4, 3, [])["optimum"] * 40) == best(trace, 3)


def test_the_optimum_of_a_tree_keeps_what_comes_back_first():
    """When b is gone, a is a leaf again, and has no next use, which it had when it was one before."""
    assert hit_rates(arrivals("a", "ab", "x", "y", "z", "x", "y", "z"), 4, 3, [])["optimum"] == 4 / 9


def test_no_policy_beats_the_optimum_on_a_random_trace():
    rng = np.random.default_rng(1)
    trace = arrivals(*(chr(97 + int(n)) for n in rng.zipf(1.3, 400) % 20))
    rates = hit_rates(trace, 4, 5, ["reuse", "lru", "lfu", "fifo", "priority"])
    assert rates["optimum"] == max(rates.values())
    assert rates["optimum"] > rates["lru"]


def conversations(count: int, turns: int, seed: int) -> list[Arrival]:
    """Conversations with one of two system prompts, in any order; each turn continues what was said."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, 900, 48).astype(np.int32) for _ in range(2)]
    said = [systems[number % 2] for number in range(count)]
    order = rng.permutation(np.repeat(np.arange(count), turns))
    found: list[Arrival] = []
    for at, number in enumerate(order.tolist()):
        said[number] = np.concatenate([said[number], rng.integers(0, 900, rng.integers(8, 40)).astype(np.int32)])
        found.append(Arrival(60.0 * at, said[number], 1))
    return found


def loop(count: int, rounds: int) -> list[Arrival]:
    rng = np.random.default_rng(count)
    prompts = [rng.integers(0, 900, 81).astype(np.int32) for _ in range(count)]
    return [Arrival(60.0 * at, prompt, 1) for at, prompt in enumerate(prompts * rounds)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize(
    "trace", [conversations(24, 6, 0), conversations(10, 12, 1), loop(9, 5), loop(13, 5), loop(21, 4)]
)
def test_device_and_host_are_one_cache_of_the_size_of_both(trace, ratio, size, policy):
    """One device of that size, least recently used first, finds as many tokens."""
    longest = max(len(one.prompt) for one in trace)
    pages = max(400 // size, longest // size + 2)
    config = EngineConfig(page_size=size, num_pages=pages, max_running_requests=1, eviction_policy="lru")
    one = replay(trace, replace(config, num_pages=int(pages * (1 + ratio))), Speed())
    deeper = {"enable_hierarchical_cache": True, "hicache_ratio": ratio, "hicache_write_policy": policy}
    both = replay(trace, replace(config, **deeper), Speed())
    assert both.hit_rate >= one.hit_rate - 0.02
    assert both.cached_tokens == one.cached_tokens or both.cached_by_tier["host"] > 0
