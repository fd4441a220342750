"""What the scheduler does for groups that forget: checkpoints where they are useful, and room counted by group."""

import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.contract.sampling_params import SamplingParams
from freehold.memory import CacheGroup
from freehold.simulation.assembly import SimulatedModel
from harness import Harness

FULL = CacheGroup()


def harness(*groups: CacheGroup, **options) -> Harness:
    defaults = {"page_size": 4, "num_pages": 400, "max_running_requests": 8, "chunked_prefill_size": 64}
    return Harness(EngineConfig(**{**defaults, **options}), token_limit=1000, model=SimulatedModel(groups=groups))


def state(pages: int) -> CacheGroup:
    return CacheGroup("state", lookback=1, is_state=True, page_count=pages)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def cached(h: Harness, prompt: list[int], max_tokens: int = 2) -> int:
    request = h.submit(prompt, greedy(max_tokens))
    h.run()
    return request.cached_tokens or 0


@pytest.mark.parametrize("length", [149, 150, 152, 153])
def test_a_prompt_is_found_again_to_its_end(length):
    h = harness(FULL, state(40))
    prompt = list(range(length))
    assert cached(h, prompt) == 0
    assert cached(h, prompt) == (length - 1) // 4 * 4
    assert cached(h, [*prompt, 900]) >= 148


def test_a_turn_goes_on_where_the_last_one_ended():
    h = harness(FULL, state(40))
    request = h.submit(list(range(50)), greedy(33))
    h.run()
    history = request.tokens.tolist()
    assert cached(h, [*history, 900]) >= len(history) - 1 - 4


def test_where_prompts_branch_off_the_third_begins():
    """The first leaves no state there; the second computes through it and does."""
    h = harness(FULL, state(40))
    shared = list(range(40))
    found = [cached(h, shared + [900 + i] * 30) for i in range(3)]
    assert found == [0, 0, 40]


def test_a_row_has_few_states_while_its_prompt_is_computed():
    h = harness(FULL, state(5), chunked_prefill_size=16)
    request = h.submit(list(range(300)), greedy(2))
    h.run()
    assert request.retractions == 0
    assert request.finish.kind == "length"


def test_of_a_bounded_group_a_request_needs_no_more_than_a_row_holds():
    window = CacheGroup("window", lookback=8, page_count=100)
    h = harness(FULL, window, state(20), chunked_prefill_size=16)
    admission, memory = h.scheduler._planner.admission, h.memory
    long, short = (h.submit(list(range(count)), greedy(40)) for count in (200, 6))
    row = memory.shape.row_needs
    assert row == [1, 2 + 2 + 2 * 4, 5]
    needs = [admission.page_counts_of(request, admission.match(request)).tolist() for request in (long, short)]
    assert needs == [[54, 12, 5], [5, 5, 5]]
    for _ in range(4):
        h.step()
    rows = h.scheduler.running.order
    growth = admission.growth_page_counts(rows)
    assert growth[0] > 30
    assert growth[1] <= row[1]
    h.run()


def test_a_request_waits_for_room_in_a_bounded_group():
    window = CacheGroup("window", lookback=8, page_count=4 * 12)
    h = harness(FULL, window, num_pages=2000, chunked_prefill_size=16)
    for i in range(12):
        h.submit(list(range(50 * i, 50 * i + 40)), greedy(30))
    h.step()
    assert len(h.scheduler.running) < 8
    ended = h.run()
    assert sum(request.retractions for request in ended) == 0


WINDOW, CHUNK, PAGE = 512, 512, 16


def window_harness(pages: int, rows: int) -> Harness:
    """Full layers beside a window of 512."""
    config = EngineConfig(
        page_size=PAGE, num_pages=64 * 9200 // PAGE, max_running_requests=rows, chunked_prefill_size=CHUNK
    )
    window = CacheGroup("window", lookback=WINDOW - 1, page_count=pages)
    return Harness(config, token_limit=25_000, model=SimulatedModel(groups=(FULL, window)))


def pages_in_rows(h: Harness) -> int:
    """Of the window's group."""
    rows = h.scheduler.running.order
    return sum(int(np.count_nonzero(h.memory.leases.row_pages(int(row), 1))) for row in rows)


def test_a_pool_for_two_windows_serves_64_long_prompts():
    h = window_harness(pages=2 * (-(-(WINDOW - 1) // PAGE) + 2 + 2 * CHUNK // PAGE), rows=64)
    rng = np.random.default_rng(0)
    requests = [h.submit(rng.integers(4, 900, 8_000).tolist(), greedy(4)) for _ in range(64)]
    h.run()
    assert all(request.finish.kind == "length" for request in requests)


@pytest.mark.parametrize("length", [800, pytest.param(8_000, marks=pytest.mark.thorough)])
def test_64_long_rows_hold_little_more_than_their_windows(length):
    h = window_harness(pages=64 * 200, rows=64)
    rng, most, rows = np.random.default_rng(0), 0, 0
    requests = [h.submit(rng.integers(4, 900, length).tolist(), greedy(1100)) for _ in range(64)]
    while not all(request.output.size for request in requests):
        h.step()
        most, rows = max(most, pages_in_rows(h)), max(rows, len(h.scheduler.running))
    assert rows == 64
    assert 64 * WINDOW / PAGE <= most <= 1.2 * 64 * (WINDOW + CHUNK) / PAGE


@pytest.mark.parametrize("length", [2_000, pytest.param(20_000, marks=pytest.mark.thorough)])
def test_a_long_row_is_as_small_as_a_short_one(length):
    h = window_harness(pages=400, rows=1)
    request, most = h.submit(list(range(4, 504)), greedy(length - 500)), 0
    for step in range(1 << 20):
        h.step()
        if request.finish is not None:
            break
        if step > 10 and step % 97 == 0:
            most = max(most, pages_in_rows(h))
    assert len(request.tokens) == length
    assert WINDOW // PAGE <= most <= -(-(WINDOW - 1) // PAGE) + 2


def test_two_thousand_sessions_on_few_states():
    """Sessions hold nothing between turns: what they left can be evicted, and each goes on."""
    h = harness(FULL, state(50), num_pages=3000, page_size=16, max_queued_requests=3000)
    rng = np.random.default_rng(0)
    histories: dict[int, list[int]] = {}
    for turn in range(2):
        for session in range(0, 2000, 40 if turn else 1):
            prompt = histories.get(session, []) + rng.integers(4, 900, 20).tolist()
            request = h.submit(prompt, greedy(3))
            request.session = f"s{session}"
            while h.scheduler.has_work:
                h.scheduler.step()
            histories[session] = request.tokens.tolist()
    h.memory.audit()
    assert h.memory.pools[1].capacity == 50


def test_a_state_that_a_row_passes_on_in_each_step_does_not_keep_a_more_important_request_waiting():
    """Before a step there is room for a second row, and after it never."""
    options = {"schedule_policy": "priority", "priority_scheduling_preemption_threshold": 1, "page_size": 1}
    h = harness(FULL, state(8), max_running_requests=3, **options)
    h.submit([10] * 20, greedy(150), priority=0)
    for _ in range(30):
        h.step()
    urgent = h.submit([7] * 5, greedy(2), priority=2)
    for _ in range(20):
        h.step()
    assert urgent.first_token is not None


@pytest.mark.parametrize("seed", range(6))
def test_a_request_lacks_room_if_refused_again_when_what_was_on_its_way_has_come(seed, monkeypatch):
    """And nobody has gone since the first time: or a prompt would have whole steps that a waiting one could share."""
    rng, group = np.random.default_rng(seed), state(7) if seed % 2 else CacheGroup("window", 8, page_count=40)
    h = harness(FULL, group, max_running_requests=3)
    admission, running, leases = h.scheduler._planner.admission, h.scheduler.running, h.memory.leases
    tried, refused, said = admission._try_admit, [], set()  # in a row: a request, and how many were running

    def try_admit(request, *arguments):
        verdict = tried(request, *arguments)
        if verdict.name == "NO_ROOM":
            if refused and (refused[-1][0] != request.id or len(running) < refused[-1][1]):
                refused.clear()
            refused.append((request.id, len(running)))
        return verdict

    monkeypatch.setattr(admission, "_try_admit", try_admit)
    for turn in range(150):
        if turn < 100 and len(h.scheduler.queue) < 3:
            h.submit(rng.integers(4, 900, int(rng.choice([5, 9, 200]))).tolist(), greedy(int(rng.integers(2, 30))))
        if len(running) and rng.random() < 0.1:
            h.scheduler.abort(running.request(int(rng.choice(running.order))).id)
        for request in h.scheduler.queue.in_turn():
            lacks = len(refused) > 1 and refused[-1][0] == request.id and len(running) >= refused[-1][1]
            assert admission.lacks_room(request) == lacks
            said.add(lacks)
            if request is h.scheduler.queue.peek():
                expected = 0 if lacks else min(len(h.scheduler.queue), leases.free_row_count)
                assert admission.candidates() == expected
        h.step()
    assert said == {True, False}
    h.run()
