"""Clients share the engine: whoever floods it pays for it, and the others hardly notice."""

import random

import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.errors import QueueFull
from freehold.sampling_params import SamplingParams
from freehold.scheduler.request import Request
from freehold.scheduler.shares import DEBTS_MAX, Shares
from freehold.scheduler.states import RequestState
from freehold.simulation.fair_shares import FairShares
from harness import Harness


def harness(**options) -> Harness:
    defaults = {"page_size": 4, "num_pages": 400, "max_running_requests": 8, "chunked_prefill_size": 64}
    h = Harness(EngineConfig(**{**defaults, **options}), token_limit=1000)
    h.engine.observe = FairShares(h.scheduler).check
    return h


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def flood(h: Harness, count: int = 128, max_tokens: int = 400, length: int = 20) -> list[Request]:
    rng = random.Random(7)
    return [
        h.submit([rng.randrange(4, 900) for _ in range(length)], greedy(max_tokens), f"flood {i}", client="flood")
        for i in range(count)
    ]


def iterations_until_ended(h: Harness, request: Request) -> int:
    for iterations in range(3000):
        if request.state is RequestState.ENDED:
            return iterations
        h.step()
    raise AssertionError("starved")


# -- accounts ---------------------------------------------------------------------------------------------


def charge(shares: Shares, number: int, cost: int) -> None:
    shares.charge(np.array([number]), np.array([cost]))


def test_a_client_alone_is_charged_nothing():
    shares = Shares()
    a = shares.join("a")
    charge(shares, a, 1000)
    b = shares.join("b")
    assert shares.served(a) == shares.served(b)


def test_a_new_client_begins_where_those_who_share_evenly_are():
    shares = Shares()
    a, b = shares.join("a"), shares.join("b")
    charge(shares, a, 1000)
    c = shares.join("c")
    assert shares.served(b) < shares.served(c) < shares.served(a)


def test_leaving_sheds_nothing_that_was_charged():
    shares = Shares()
    a, b = shares.join("a"), shares.join("b")
    charge(shares, a, 1000)
    before = shares.served(a)
    shares.leave("a")
    assert shares.served(shares.join("a")) == before
    charge(shares, b, 5000)
    shares.leave("a")
    c = shares.join("c")
    assert shares.served(shares.join("a")) == shares.served(c), "time has passed what it was charged"


def test_a_flood_of_new_clients_starves_nobody():
    """Whoever was served most comes first some day, although there is always somebody new."""
    shares = Shares()
    old, _ = shares.join("old"), shares.join("other")
    charge(shares, old, 1000)
    for i in range(1000):
        new = shares.join(f"new {i}")
        if shares.served(new) > shares.served(old):
            return
        charge(shares, new, 10)
        shares.leave(f"new {i}")
    raise AssertionError("still first in line")


def test_numbers_and_debts_are_bounded():
    shares = Shares()
    shares.join("stays")
    for i in range(3 * DEBTS_MAX):
        number = shares.join(f"guest {i}")
        assert number <= 1
        charge(shares, number, 10)
        shares.leave(f"guest {i}")
    assert len(shares._debts) <= DEBTS_MAX


# -- admission --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
@pytest.mark.parametrize("pages", [60, 400])
def test_a_flood_costs_others_a_few_steps(policy, pages):
    """One client asks for 128 outputs of 400 tokens. Another asks for 10, and gets them at once: rows (400 pages) and
    memory (60 pages) are taken from whoever holds most."""
    h = harness(num_pages=pages, schedule_policy=policy)
    flood(h, max_tokens=60 if pages == 60 else 400)
    for _ in range(40):
        h.step()
    for i in range(10):
        small = h.submit([500 + i] * 10, greedy(10), client="modest")
        assert iterations_until_ended(h, small) <= 24, "10 tokens, and some steps to get a place"
    h.scheduler.abort_all()
    h.run()


def test_clients_that_always_wait_are_served_alike():
    """Three clients that all want more than there is, with requests of different sizes: after a while their shares of
    what was computed differ by less than two requests each."""
    h = harness(max_running_requests=4)
    sizes = {"short": (4, 8), "long": (60, 30), "talkative": (10, 90)}
    served = dict.fromkeys(sizes, 0)

    def observe(step):
        for row, count, decodes in zip(step.rows.tolist(), step.counts.tolist(), step.decodes.tolist(), strict=True):
            served[h.scheduler.running.request(row).client] += 2 if decodes else count

    h.engine.observe = observe
    rng = random.Random(0)
    for _ in range(1500):
        for client, (length, output) in sizes.items():
            if sum(request.client == client and request.is_queued for request in h.scheduler.requests.values()) < 3:
                h.submit([rng.randrange(900) for _ in range(length)], greedy(output), client=client)
        h.step()
    largest = max(length + 2 * output for length, output in sizes.values())
    assert max(served.values()) - min(served.values()) < 4 * largest, served
    assert min(served.values()) > 10 * largest
    h.scheduler.abort_all()
    h.run()


def test_a_prompt_does_not_wait_for_another_clients_long_one():
    h = harness(num_pages=2000, chunked_prefill_size=32, max_running_requests=4)
    h.submit([700] * 900, greedy(2), client="long")
    h.step()
    small = h.submit([500] * 10, greedy(2), client="modest")
    assert iterations_until_ended(h, small) <= 6, "900 tokens take 28 steps"
    h.run()


def test_one_client_can_not_fill_the_queue_for_others():
    h = harness(max_queued_requests=4)
    flood(h, count=4)
    with pytest.raises(QueueFull):
        h.submit([1], greedy(1), client="flood")
    for i in range(4):
        h.submit([1], greedy(1), client=f"guest {i}")
    with pytest.raises(QueueFull):
        h.submit([1], greedy(1), client="guest 0")
    with pytest.raises(QueueFull, match="the limit is 4"):
        h.submit([1], greedy(1), client="guest 4")
    h.scheduler.abort_all()
    h.run()


# -- who gives way ----------------------------------------------------------------------------------------


def test_equal_clients_do_not_take_rows_from_each_other():
    h = harness(num_pages=2000)
    rng = random.Random(3)
    for i in range(200):
        h.submit([rng.randrange(900) for _ in range(10)], greedy(20), client=f"client {i % 2}")
    h.run()
    assert h.scheduler.lifecycle.retraction_count == 0


def test_rows_are_taken_once_and_no_more_than_are_needed():
    h = harness(num_pages=2000)
    flood(h, count=20)
    for _ in range(40):
        h.step()
    other = [h.submit([300 + i] * 5, greedy(60), client="other") for i in range(2)]
    while any(request.state is not RequestState.ENDED for request in other):
        h.step()
    assert h.scheduler.lifecycle.retraction_count == 2
    h.scheduler.abort_all()
    h.run()


def test_a_client_keeps_as_many_rows_as_the_one_that_wants_more_will_have():
    h = harness(num_pages=2000, max_running_requests=7)
    flood(h, count=20)
    for _ in range(40):
        h.step()
    for i in range(8):
        h.submit([300 + i] * 5, greedy(300), client="other")
    for _ in range(100):
        h.step()
    assert h.scheduler.lifecycle.retraction_count == 3, "four rows and three: one more would turn it round"
    h.scheduler.abort_all()
    h.run()


def test_a_client_takes_nothing_from_those_who_were_served_less():
    h = harness(num_pages=2000)
    charge(h.scheduler.shares, h.scheduler.shares.join("indebted"), 0)
    flood(h, count=8)
    charge(h.scheduler.shares, h.scheduler.shares.join("indebted"), 1_000_000)
    for _ in range(40):
        h.step()
    h.submit([300] * 5, greedy(10), client="indebted")
    for _ in range(100):
        h.step()
    assert h.scheduler.lifecycle.retraction_count == 0
    h.scheduler.abort_all()
    h.run()


# -- decoding ---------------------------------------------------------------------------------------------


def test_rows_that_decode_take_turns():
    h = harness(num_pages=2000, fair_decode_rows=2)
    requests = flood(h, count=7, max_tokens=300)
    small = h.submit([500] * 4, greedy(60), client="modest")
    for _ in range(10):
        h.step()
    length = h.scheduler.running.length
    before = [int(length[request.lease.row]) for request in requests]
    for _ in range(35):
        h.step()
    got = [int(length[request.lease.row]) - known for request, known in zip(requests, before, strict=True)]
    assert got == [10] * 7, "two of seven in each step, by turns"
    assert iterations_until_ended(h, small) < 30
    h.scheduler.abort_all()
    h.run()
