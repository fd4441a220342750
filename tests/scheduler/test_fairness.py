"""Nobody waits for ever, and nobody pays for what happened to others."""

import itertools
import math

import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.contract.errors import InvalidParameter
from freehold.contract.sampling_params import SamplingParams
from freehold.memory import OwnershipError
from freehold.scheduler.queue import RANKED_MAX, WaitingQueue
from freehold.scheduler.request import PROGRESS_TOKENS, SETBACKS_TRUSTED, Request
from freehold.scheduler.scheduler import PauseMode
from freehold.scheduler.states import Event, RequestState
from harness import Harness

OVERTAKEN_MAX = EngineConfig().max_overtaken


def harness(**options) -> Harness:
    defaults = {"page_size": 4, "num_pages": 100, "max_running_requests": 8, "chunked_prefill_size": 64}
    return Harness(EngineConfig(**{**defaults, **options}), token_limit=1000)


def greedy(max_tokens=8, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


# -- the queue --------------------------------------------------------------------------------------------


def queued(policy: str, count: int) -> tuple[WaitingQueue, list[Request]]:
    queue = WaitingQueue(policy)
    requests = [Request(str(i), np.array([i], np.int32), SamplingParams(), order=i + 1) for i in range(count)]
    for request in requests:
        queue.push(request)
    return queue, requests


def test_whoever_was_overtaken_often_enough_goes_first_under_lpm():
    queue, (old,) = queued("lpm", 1)
    for i in range(1000):
        young = Request(f"young {i}", np.array([1], np.int32), SamplingParams(), order=i + 2)
        queue.push(young)
        queue.rank(i, lambda request: 0 if request is old else 100)
        if queue.peek() is old:
            break
        queue.remove(young)
    assert i == OVERTAKEN_MAX + 1


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_being_looked_at_changes_nothing(policy):
    queue, requests = queued(policy, 5)
    for version in range(500):
        queue.rank(version, lambda request: 7)
        assert list(queue.in_turn()) == requests
        assert not any(queue.is_due(request) for request in requests)


def test_ranking_looks_up_a_few_at_a_time_and_nothing_twice():
    queue, requests = queued("lpm", 100)
    looked: list[str] = []
    for version in (1, 1, 1, 1, 1, 1, 1, 1, 1):
        before = len(looked)
        queue.rank(version, lambda request: (looked.append(request.id), request.order)[1])
        assert len(looked) - before <= RANKED_MAX
    assert sorted(looked) == sorted(request.id for request in requests)
    assert list(queue.in_turn()) == requests[::-1], "the longest match first"


def test_a_new_version_of_the_tree_is_ranked_anew():
    queue, requests = queued("lpm", 3)
    queue.rank(1, lambda request: request.order)
    assert list(queue.in_turn()) == requests[::-1]
    queue.rank(2, lambda request: -request.order)
    assert list(queue.in_turn()) == requests


def test_those_who_leave_the_queue_leave_nothing_behind():
    h = harness(max_queued_requests=4)
    h.scheduler.pause(PauseMode.IN_PLACE)
    for i in range(1000):
        h.submit([i % 100 + 1] * 50, greedy(), f"r{i}")
        h.scheduler.abort(f"r{i}")
        h.step()
    queue = h.scheduler.queue
    assert [len(one) for one in (queue._lines, queue._unranked)] == [0, 0]


def test_deadlines_of_ended_requests_are_forgotten():
    h = harness(request_timeout=3600.0, waiting_timeout=1800.0)
    h.scheduler.pause(PauseMode.IN_PLACE)
    for i in range(5000):
        h.submit([1], greedy(), f"r{i}")
        h.scheduler.abort(f"r{i}")
        h.step()
    assert len(h.scheduler.lifecycle._deadlines) <= 1025


# -- admission --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_large_request_is_admitted_although_small_ones_keep_coming(policy):
    """The large one needs 48 of 60 pages; the small ones share a cached prefix, and together they fill memory."""
    h = harness(num_pages=60, schedule_policy=policy, max_running_requests=16)
    h.submit(list(range(40)), greedy(1), "warm")
    h.run()
    admitted_after = 0
    for i in range(8):
        h.submit([*range(40), 500 + i], greedy(20))
    for _ in range(5):
        h.step()
    large = h.submit([900] * 180, greedy(12), "large")
    for i in itertools.count():
        small = h.submit([*range(40), 600 + i % 300], greedy(20), f"small {i}")
        h.step()
        if large.state is not RequestState.WAITING:
            break
        admitted_after += small.state is not RequestState.WAITING
        assert i < 3000, "starved"
    ended_before = sum(request.id.startswith("small") and request.first_scheduled is not None for request in h.ended)
    assert ended_before <= OVERTAKEN_MAX + 16
    h.scheduler.abort_all()
    h.run()


def test_a_failed_admission_leaves_no_trace():
    """Memory is full of a running request: those that wait are looked at again and again."""
    h = harness(num_pages=50, max_running_requests=4, eviction_policy="lru")
    h.submit(list(range(60)), greedy(1), "warm")
    h.run()
    h.submit([700] * 100, greedy(60), "running")
    h.scheduler.growth.share = 1.0
    for _ in range(6):
        h.step()
    waiting = h.submit([*range(50), *range(300, 340)], greedy(60), "waiting")
    tree = h.memory.tree

    def trace():
        nodes = [
            (node.serial, node.end, node.hits, node.last_used, node.level, node.holds, node.fence)
            for node in tree.nodes()
            if node.parent is not None and not node.holds
        ]
        return sorted(nodes), tree.history.ages.as_dict()["hit"], list(h.memory.tails), h.scheduler.queue.peek()

    before = trace()
    for _ in range(10):
        h.step()
        assert waiting.state is RequestState.WAITING
    assert trace() == before
    h.run()
    assert waiting.finish.is_complete


def test_an_admission_that_waits_for_pages_in_limbo_counts_no_use_until_it_starts():
    h = harness(num_pages=50, max_running_requests=4)
    h.submit(list(range(40)), greedy(1), "warm")
    h.run()
    h.submit([700] * 4, greedy(30), "running")
    h.step()
    h.engine.hold = True
    h.step()
    ballast = h.memory.leases.open(h.memory.match("ballast", np.zeros(1, np.int32)))
    ballast.extend(4 * (h.memory.free_page_count - 2))
    h.memory.leases.submit(np.array([ballast.row]), h.memory.epochs.submitted)
    ballast.release()
    waiting = h.submit([*range(36), *range(300, 340)], greedy(4), "waiting")

    def uses():
        hits = sum(node.hits for node in h.memory.tree.nodes() if node.namespace.salt == "")
        return hits, sum(h.memory.tree.history.ages.hit)

    before = uses()
    for _ in range(3):
        h.step()
        assert h.memory.counts().limbo > 10
        assert waiting.state is RequestState.WAITING
        assert uses() == before
    h.engine.hold = False
    h.engine.release()
    while waiting.state is RequestState.WAITING:
        h.step()
    nodes, pages = before
    assert uses() == (nodes + 1, pages + 9), "one node, nine pages, once"
    h.run()


def test_a_failed_admission_gives_back_the_tail_it_did_not_take():
    h = harness(num_pages=20, page_size=16)
    h.submit(list(range(20)), greedy(2), "turn")
    request = h.scheduler.requests["turn"]
    request.session = "s"
    h.run()
    assert [name for name, _ in h.memory.tails] == ["s"]
    ((_, tail),) = h.memory.tails
    ballast = h.memory.leases.open(h.memory.match("ballast", np.zeros(1, np.int32)))
    ballast.extend(16 * h.memory.free_page_count)
    second = h.submit([*range(20), *request.output.tolist(), *range(100, 200)], greedy(2), "second")
    second.session = "s"
    for _ in range(5):
        h.scheduler.step()
        assert second.state is RequestState.WAITING
    assert [one for _, one in h.memory.tails] == [tail], "not even parked anew"
    ballast.release()
    h.run()
    assert second.cached_tokens == 21, "sixteen in the tree, five in the tail"


def test_the_tail_that_a_turn_takes_up_is_not_given_up_to_make_room_for_it():
    h = harness(num_pages=20, page_size=16)
    outputs = {}
    for name, first in (("s", 0), ("t", 500)):
        turn = h.submit(list(range(first, first + 20)), greedy(2), name)
        turn.session = name
        h.run()
        outputs[name] = turn.output.tolist()
    ballast = h.memory.leases.open(h.memory.match("ballast", np.zeros(1, np.int32)))
    ballast.extend(16 * h.memory.free_page_count)
    second = Request(
        "second", np.array([*range(20), *outputs["s"], *range(100, 120)], np.int32), greedy(2), session="s"
    )
    h.scheduler.add(second)
    h.step()
    assert second.cached_tokens == 21, "its own tail, the older one, is taken up"
    assert [name for name, _ in h.memory.tails] == [], "that of t made room"
    ballast.release()
    h.run()


def test_an_admission_that_cannot_succeed_evicts_nothing():
    h = harness(num_pages=20, page_size=4)
    h.submit(list(range(20)), greedy(1), "warm")
    h.run()
    cached = h.memory.tree.page_count
    ballast = h.memory.leases.open(h.memory.match("ballast", np.zeros(1, np.int32)))
    ballast.extend(4 * (h.memory.free_page_count - 2))
    waiting = h.submit([900] * 64, greedy(1), "waiting")
    for _ in range(3):
        h.step()
        assert waiting.state is RequestState.WAITING
        assert h.memory.tree.page_count == cached
    ballast.release()
    h.run()


# -- what running requests will need --------------------------------------------------------------------------


def test_what_running_requests_will_need_is_not_given_to_others():
    h = harness(num_pages=20, max_running_requests=2)
    h.scheduler.growth.share = 1.0
    h.submit([1] * 8, greedy(64), "first")
    h.step()
    second = h.submit([2] * 8, greedy(40), "second")
    h.run()
    assert second.finish.is_complete
    assert h.scheduler.lifecycle.retraction_count == 0


def test_memory_that_ran_out_teaches_admission_to_expect_more():
    h = harness(num_pages=20, max_running_requests=2)
    h.scheduler.growth.share = 0.05
    h.submit([1] * 8, greedy(64))
    h.submit([2] * 8, greedy(64))
    while not h.scheduler.lifecycle.retraction_count:
        h.step()
    assert h.scheduler.growth.share > 0.25
    h.run()


def test_drafts_that_do_not_fit_are_left_out_without_a_pause():
    h = harness(num_pages=60, page_size=1, speculative_algorithm="ngram")
    h.submit([1, 2, 3, 4], greedy(40))
    while len(h.scheduler.running) == 0 or h.scheduler.in_flight_count == 0:
        h.step()
    ballast = h.memory.leases.open(h.memory.match("ballast", np.zeros(1, np.int32)))
    ballast.extend(h.memory.free_page_count - 12)
    left_out = 0
    while h.memory.free_page_count > 2:
        free = h.memory.free_page_count
        h.step()
        left_out += free <= 8
        assert h.scheduler.in_flight_count > 0, "the engine has nothing to do"
    assert left_out
    ballast.release()
    h.run()


# -- preemption, trust, pauses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [True, False])
def test_preemption_for_memory_counts_what_only_the_victim_holds(cache):
    """Prompts are published as they are computed: what the victim holds is mostly the tree's by then."""
    h = harness(
        schedule_policy="priority", priority_scheduling_preemption_threshold=1, disable_radix_cache=not cache,
        chunked_prefill_size=400,
    )  # fmt: skip
    h.submit([5] * 4, greedy(100), "stays", priority=5)
    low = h.submit(list(range(320)), greedy(60), priority=0)
    for _ in range(4):
        h.step()
    high = h.submit([999] * 240, greedy(1), priority=5)
    iterations = 0
    while high.first_scheduled is None:
        h.step()
        iterations += 1
    assert iterations <= 4
    assert low.transitions[RequestState.RUNNING, Event.PREEMPTED] == 1
    h.run()
    assert len(low.output) == 60


def test_the_least_important_request_is_preempted_first():
    h = harness(schedule_policy="priority", priority_scheduling_preemption_threshold=1, max_running_requests=3)
    running = [h.submit([100 * i] * 8, greedy(30), priority=i) for i in (2, 1, 3)]
    for _ in range(4):
        h.step()
    h.submit([999] * 8, greedy(1), priority=5)
    h.run()
    assert [request.retractions for request in running] == [0, 1, 0]


def test_what_others_hold_too_is_not_counted_for_preemption():
    """The victim shares its prompt with a request that stays: to preempt it would bring nothing."""
    h = harness(schedule_policy="priority", priority_scheduling_preemption_threshold=1, chunked_prefill_size=400)
    h.submit([*range(320), 1], greedy(60), "stays", priority=5)
    h.step()
    h.step()
    low = h.submit([*range(320), 2], greedy(40), "low", priority=0)
    for _ in range(4):
        h.step()
    assert low.cached_tokens == 320
    h.submit([999] * 240, greedy(1), "high", priority=5)
    for _ in range(10):
        h.step()
    assert low.retractions == 0
    h.run()


def test_nobody_is_preempted_for_a_request_that_waits_for_a_shared_prefix():
    h = harness(
        schedule_policy="priority", priority_scheduling_preemption_threshold=1, chunked_prefill_size=8,
        max_running_requests=2,
    )  # fmt: skip
    low = h.submit([500, 501], greedy(60), "low", priority=0)
    while low.state is not RequestState.RUNNING:
        h.step()
    h.submit([*range(100), 1], greedy(4), "first", priority=5)
    h.step()
    h.submit([*range(100), 2], greedy(4), "second", priority=5)
    for _ in range(6):
        h.step()
        assert low.retractions == 0, "the second can't begin before the first has computed the prefix"
    h.run()


def test_pauses_and_preemption_cost_no_trust():
    h = harness(max_running_requests=8)
    requests = [h.submit([i + 1] * 20, greedy(100)) for i in range(3)]
    for _ in range(5):
        for _ in range(4):
            h.step()
        h.scheduler.pause(PauseMode.RETRACT)
        h.scheduler.resume()
    for _ in range(5):
        h.step()
    assert [request.retractions for request in requests] == [5, 5, 5]
    assert all(request.is_trusted for request in requests)
    assert len(h.scheduler.running) == 3, "they still run beside each other"
    h.run()


def test_trust_comes_back_with_progress():
    h = harness(num_pages=200)
    request = h.submit([1, 2, 3], greedy(300))
    for _ in range(SETBACKS_TRUSTED):
        while request.state is not RequestState.RUNNING:
            h.step()
        h.scheduler.drain()
        h.scheduler.lifecycle.retract(request.lease.row, Event.RETRACTED)
    assert not request.is_trusted
    for _ in range(60):
        h.step()
    h.scheduler.drain()
    h.scheduler.lifecycle.retract(request.lease.row, Event.RETRACTED)
    assert request.is_trusted
    h.run()


@pytest.mark.parametrize(("progress", "setbacks"), [(PROGRESS_TOKENS - 1, 2), (PROGRESS_TOKENS, 1)])
def test_progress_is_so_many_tokens_since_the_request_came_back(progress, setbacks):
    h = harness(num_pages=200, disable_overlap_schedule=True)
    request, running = h.submit([1, 2, 3], greedy(300)), h.scheduler.running
    for wanted in (4, progress):
        while len(running) == 0 or running.length[0] - running.prefill_end[0] < wanted:
            h.step()
        assert running.length[0] - running.prefill_end[0] == wanted
        h.scheduler.lifecycle.retract(request.lease.row, Event.RETRACTED)
    assert request.setbacks == setbacks
    h.run()


def test_what_an_engine_waits_for_is_told_in_numbers():
    h = harness(num_pages=40, max_running_requests=3)
    assert h.scheduler.waits_for() == "requests"
    h.submit(list(range(40)), greedy(1))
    h.run()
    running = h.submit([7] * 9, greedy(60))
    h.step()
    assert h.scheduler.waits_for() == "the engine to complete step 2 with 9 tokens"
    h.scheduler.drain()
    h.submit([8] * 120, greedy(10), "large")
    counts = h.memory.counts()
    assert (counts.free, counts.tree, counts.lease) == (27, 10, 1)
    assert h.scheduler.waits_for() == (
        "room for request 'large' of 120 tokens beside 1 running ones: "
        "27 pages free, 0 in limbo, 10 evictable, 1 leased, 2 rows free"
    )
    h.scheduler.pause(PauseMode.IN_PLACE)
    assert h.scheduler.waits_for() == "generation to be continued (paused, mode in_place)"
    h.scheduler.resume()
    h.run()
    assert running.finish.is_complete


# -- an engine that hangs ---------------------------------------------------------------------------------------


def test_while_the_engine_hangs_aborts_and_timeouts_are_heard():
    h = harness()
    now = [0.0]
    h.scheduler.lifecycle.clock = lambda: now[0]
    h.scheduler.add(slow := Request("slow", np.array([1, 2], np.int32), greedy(50), timeout=5.0))
    h.submit([3, 4], greedy(50), "aborted")
    h.step()
    h.engine.hold = True
    for _ in range(5):
        h.step()
    h.scheduler.abort("aborted")
    assert [request.id for request in h.step().ended] == ["aborted"]
    now[0] = 6.0
    assert [request.id for request in h.step().ended] == ["slow"]
    assert slow.finish.kind == "timeout"
    now[0] = 400.0
    assert h.scheduler.step().ended == []
    assert "no result for 300 s" in str(h.scheduler.stuck)
    h.engine.hold = False
    h.scheduler.step()
    assert h.scheduler.stuck is None
    h.run()


def test_the_thread_that_moves_pages_is_not_whoever_calls():
    from concurrent.futures import ThreadPoolExecutor

    h = harness()
    h.submit([1, 2, 3], greedy(3))
    h.step()
    with ThreadPoolExecutor(1) as pool, pytest.raises(OwnershipError, match="not the one that moves pages"):
        pool.submit(h.scheduler.step).result()
    h.run()


# -- what can't be asked for ------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [math.nan, math.inf, 0.0, -1.0])
def test_a_timeout_is_a_positive_number(timeout):
    h = harness()
    with pytest.raises(InvalidParameter, match="timeout: must be a positive number"):
        h.scheduler.add(Request("r", np.array([1], np.int32), greedy(), timeout=timeout))
    for name in ("request_timeout", "waiting_timeout", "running_timeout", "watchdog_timeout"):
        with pytest.raises(ValueError, match=name):
            EngineConfig(**{name: timeout})
    assert not h.scheduler.has_work


def test_an_output_that_a_regular_expression_may_end_need_not_fit():
    h = harness()
    h.submit([1] * 300, greedy(200, stop_regex=("7><",)))
    h.scheduler.abort_all()
    h.run()


def test_a_tail_past_the_scored_position_is_not_taken_up():
    h = harness(page_size=16)
    h.submit(list(range(20)), greedy(2), "turn").session = "s"
    h.run()
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=0, prompt_logprobs_start=18)
    first = h.ended[0]
    request = h.submit([*range(20), *first.output.tolist(), 7, 8, 9], params, "second")
    request.session = "s"
    h.run()
    assert request.cached_tokens == 16, "the tail ends at 21, and 18 is to be scored"


def test_a_tail_that_a_step_in_flight_still_writes_is_waited_for():
    h = harness(page_size=16)
    prompt = list(range(20))
    probe = h.submit(prompt, greedy(4), "probe")
    h.run()
    h.memory.flush()
    stop = int(probe.output[1])
    first = Request("first", np.array(prompt, np.int32), greedy(9, stop=(f"<{stop}>",)), session="s")
    h.scheduler.add(first)
    while first.state is not RequestState.ENDED:
        h.step()
    ((_, tail),) = h.memory.tails
    assert not h.memory.epochs.passed(tail.fence), "its stop was found while the next step ran"
    second = Request("second", np.array([*first.tokens, 7, 8, 9], np.int32), greedy(2), session="s")
    h.scheduler.add(second)
    h.step()
    assert second.state is RequestState.WAITING
    h.run()
    assert second.cached_tokens == len(first.tokens) - 1


def test_whoever_is_due_does_not_wait_for_a_prefix(monkeypatch):
    h = harness(chunked_prefill_size=16)
    h.submit(list(range(200)), greedy(2), "first")
    h.step()
    second = h.submit(list(range(200)), greedy(2), "second")
    admission, match = h.scheduler._planner.admission, h.scheduler._planner.admission.match(second)
    computed = admission.pages_being_computed()
    assert admission.waits(second, match, computed)
    monkeypatch.setattr(h.scheduler.queue, "is_due", lambda request: request is second)
    assert not admission.waits(second, match, computed)
    h.run()


def test_a_prompt_in_many_small_chunks_is_progress_without_overlap():
    """Between two iterations nothing is in flight and nobody has had a token, and all is well."""
    h = harness(disable_overlap_schedule=True, chunked_prefill_size=2)
    h.submit(list(range(300)), greedy(2))
    assert len(h.run()) == 1


@pytest.mark.parametrize("rows", [2, 3])
def test_a_more_important_request_goes_before_its_own_clients_prompt(rows):
    """That prompt has its client's tokens of every step. Nobody else gives way for it, again and again, in vain."""
    h = harness(
        schedule_policy="priority", priority_scheduling_preemption_threshold=1, max_running_requests=rows,
        chunked_prefill_size=8, num_pages=400,
    )  # fmt: skip
    own = h.submit(list(range(200)), greedy(2), priority=0, client="a")
    other = h.submit(list(range(300, 500)), greedy(2), priority=0, client="b")
    for _ in range(6):
        h.step()
    assert [other.state, own.state] == [RequestState.PREFILLING] * 2
    important = h.submit(list(range(600, 620)), greedy(2), priority=1, client="a")
    for _ in range(30):
        h.step()
        if important.state is RequestState.ENDED:
            break
    assert important.state is RequestState.ENDED
    assert (own.retractions, other.retractions) == (1, 0)
    h.run()


@pytest.mark.parametrize("priorities", [(0, 0), (1, 0), (0, 1)])
def test_the_least_important_request_gives_way_when_memory_runs_out(priorities):
    """The least important first, among equals the one that came last."""
    h = harness(num_pages=20, schedule_policy="priority")
    first, second = (
        h.submit(list(range(100 * i, 100 * i + 28)), greedy(40), priority=priority)
        for i, priority in enumerate(priorities)
    )
    h.run()
    stays, goes = (second, first) if priorities == (0, 1) else (first, second)
    assert goes.retractions > 0
    assert stays.retractions == 0


def test_less_important_requests_that_are_admitted_make_a_waiting_one_due():
    """It may wait for a prefix while they go, but not for ever. Another client's do not count, nor does it count for
    those that come later."""
    queue = WaitingQueue("priority", overtaken_max=2)

    def waiting(order: int, priority: int, client: int = 0) -> Request:
        request = Request(f"r{order}", np.arange(4, dtype=np.int32), SamplingParams(), priority=priority)
        request.order, request.client_number = order, client
        queue.push(request)
        return request

    important = waiting(0, 2)
    lesser = [waiting(order, 0) for order in (1, 2, 3, 9, 10)]
    strangers = [waiting(order, 0, client=1) for order in (4, 5, 6)]
    for request in [*strangers, *lesser[:2]]:
        queue.remove(request)
        assert not queue.is_due(important)
    for request in lesser[2:]:
        queue.remove(request)
        assert queue.is_due(important)
    assert not queue.is_due(waiting(7, 2))
    assert not queue.is_due(waiting(8, 0))
