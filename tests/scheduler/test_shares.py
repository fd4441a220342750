"""Clients share the engine: whoever floods it pays for it, and the others hardly notice."""

import random
from collections import Counter

import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.contract.errors import QueueFull
from freehold.contract.sampling_params import SamplingParams
from freehold.contract.step import StepTiming
from freehold.scheduler.chunk_budget import CHUNK_SLOW
from freehold.scheduler.fair_steps import PROMPT_MIN
from freehold.scheduler.request import Request
from freehold.scheduler.shares import DEBTS_MAX, LEFT_MAX, MOMENT_S, Shares
from freehold.scheduler.states import RequestState
from freehold.scheduler.step_time import StepTime
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
    shares.charge(np.array([number]), np.array([False]), np.array([cost]))


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
    shares.leave("a", 0.0)
    assert shares.served(shares.join("a")) == before
    charge(shares, b, 5000)
    shares.leave("a", 0.0)
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
        shares.leave(f"new {i}", 0.0)
    raise AssertionError("still first in line")


def test_numbers_and_debts_are_bounded():
    shares = Shares()
    shares.join("stays")
    for i in range(3 * DEBTS_MAX):
        number = shares.join(f"guest {i}")
        assert number <= 1
        charge(shares, number, 10)
        shares.leave(f"guest {i}", 0.0)
    assert len(shares._debts) <= DEBTS_MAX


def test_who_left_a_moment_ago_still_competes():
    shares = Shares()
    for name in ("a", "b"):
        shares.join(name)
    assert not shares.somebody_left(0.0)
    shares.leave("b", 10.0)
    assert shares.somebody_left(10.5)
    assert not shares.somebody_left(10.0 + MOMENT_S)
    shares.join("b")
    assert not shares.somebody_left(10.5), "it is back"
    for i in range(3 * LEFT_MAX):
        shares.join(f"guest {i}")
        shares.leave(f"guest {i}", 20.0 + i)
    assert len(shares._left) == LEFT_MAX


# -- what steps take --------------------------------------------------------------------------------------


def step_seconds(rows: int, tokens: int) -> float:
    return 0.005 + 0.001 * rows + 0.002 * tokens


def learned(rng: random.Random, noise: float = 0.0) -> StepTime:
    time = StepTime()
    for _ in range(300):
        rows, tokens = rng.choice([1, 2, 8]), rng.choice([0, 0, 0, 50])
        time.learn(rows, tokens, step_seconds(rows, tokens) * (1 + noise * (rng.random() - 0.5)))
    return time


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_what_rows_and_prompt_tokens_take_is_learned(noise):
    time = learned(random.Random(0), noise)
    assert time.token == pytest.approx(0.002, rel=0.1 + noise)
    for rows in (1, 2, 5, 8):
        assert time.decode(rows) == pytest.approx(step_seconds(rows, 0), rel=0.05 + noise / 2)
    assert time.decode(0) == 0.0
    assert time.rows_within(0.0041) == pytest.approx(4, abs=10 * noise)


def test_what_a_row_adds_depends_on_how_many_there_are():
    """Kernels work on several rows at a time: the second is dear, the fifteenth is cheap."""
    time = StepTime([StepTiming(1, 0, 0.006), StepTiming(16, 0, 0.021), StepTiming(0, 16, 0.032)])
    assert time.rows_within(0.006) == 6
    time.learn(7, 0, 0.015)
    assert time.rows_within(0.006) == 4
    assert time.rows_within(0.009) == 6


def test_more_rows_never_take_less_time():
    """What was seen when the machine was slow is corrected by steps of more rows, and by nothing else."""
    time = StepTime([StepTiming(1, 0, 0.050), StepTiming(4, 0, 0.010), StepTiming(8, 0, 0.020)])
    assert [time.decode(rows) for rows in (1, 2, 4)] == [0.010] * 3
    assert time.decode(6) == pytest.approx(0.015)


def test_beyond_what_was_seen_no_row_is_free():
    time = StepTime()
    assert not time.is_known
    for rows in (1, 8) * 20:
        time.learn(rows, 0, 0.01)
    assert time.is_known
    assert time.decode(16) == pytest.approx(0.02)
    assert time.rows_within(0.01) == 15


# -- parts of a step --------------------------------------------------------------------------------------


def timed(**options) -> Harness:
    """The simulated engine takes as long as `step_seconds`, or says so."""
    h = harness(**options)
    for rows, tokens in ((1, 0), (16, 0), (0, 16)):
        h.scheduler.results._chunks.time.learn(rows, tokens, step_seconds(rows, tokens))
    return h


def parts(h: Harness) -> list[tuple[Counter, Counter]]:
    """Of each step that comes: decoding rows and prompt tokens by client."""
    seen = []

    def observe(step):
        rows, tokens = Counter(), Counter()
        for row, count, decodes in zip(step.rows.tolist(), step.counts.tolist(), step.decodes.tolist(), strict=True):
            (rows if decodes else tokens)[h.scheduler.running.request(row).client] += 1 if decodes else count
        seen.append((rows, tokens))

    h.engine.observe = observe
    return seen


def test_no_part_takes_longer_than_half_the_step_of_whoever_asks_for_least():
    h = timed(num_pages=2000, max_running_requests=32, chunked_prefill_size=256)
    flood(h, count=60, max_tokens=300)
    for _ in range(20):
        h.step()
    seen = parts(h)
    small = h.submit([500] * 4, greedy(40), client="modest")
    iterations_until_ended(h, small)
    beside = [(rows, tokens) for rows, tokens in seen if rows["modest"]]
    assert len(beside) >= 39
    alone = step_seconds(1, 0)
    for rows, tokens in beside:
        assert 0.001 * rows["flood"] <= 0.6 * alone
        assert 0.002 * tokens["flood"] <= max(0.6 * alone, 0.002 * PROMPT_MIN)
    assert max(rows["flood"] for rows, _ in beside) >= 3, "and not much less"
    h.scheduler.abort_all()
    h.run()


def test_a_long_prompt_is_cut_to_what_those_who_decode_ask_for():
    h = timed(num_pages=2000, max_running_requests=4, chunked_prefill_size=256)
    small = h.submit([500] * 4, greedy(30), client="modest")
    for _ in range(4):
        h.step()
    seen = parts(h)
    for i in range(4):
        h.submit([700 + i] * 200, greedy(1), client="long")
    iterations_until_ended(h, small)
    for _, tokens in [part for part in seen if part[0]["modest"]][2:]:
        assert 0 < tokens["long"] <= max(0.6 * step_seconds(1, 0) / 0.002, PROMPT_MIN)
    h.run()


def test_who_asks_for_least_has_all_of_it_and_each_other_half_as_much():
    h = timed(num_pages=2000, chunked_prefill_size=512)
    seen = parts(h)
    for client, length in (("long", 60), ("modest", 16), ("longest", 80)):
        h.submit([500 + length] * length, greedy(1), client=client)
    h.step()
    ((_, tokens),) = seen
    assert tokens["modest"] == pytest.approx(16, abs=1)
    assert tokens["long"] == tokens["longest"] == pytest.approx(8, abs=1)
    h.run()


def test_between_its_requests_a_client_still_competes():
    h = timed(num_pages=2000, max_running_requests=32)
    flood(h, count=60, max_tokens=300)
    for _ in range(20):
        h.step()
    seen = parts(h)
    for i in range(5):
        iterations_until_ended(h, h.submit([500 + i] * 4, greedy(8), client="modest"))
        for _ in range(4):
            h.step()
    assert max(rows["flood"] for rows, _ in seen[8:]) < 12
    h.scheduler.abort_all()
    h.run()


def test_where_nobody_competes_nothing_is_held_back():
    h = timed(num_pages=2000, max_running_requests=32, chunked_prefill_size=256)
    seen = parts(h)
    flood(h, count=32, max_tokens=40)
    h.run()
    h.submit([700] * 600, greedy(1), client="flood")
    h.run()
    assert max(rows["flood"] for rows, _ in seen) == 32
    assert max(tokens["flood"] for _, tokens in seen) == CHUNK_SLOW


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
