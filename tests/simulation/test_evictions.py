"""Eviction alone, on small traces where the answer can be seen."""

import numpy as np

from freehold.planning.evictions import hit_rates
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
