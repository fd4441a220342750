"""Timeouts, preemption, pauses and new weights; and the table of states itself."""

import itertools
from concurrent.futures import Future

import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.contract.errors import BadRequest
from freehold.contract.sampling_params import SamplingParams
from freehold.contract.step import NOT_SCORED
from freehold.memory import Retention
from freehold.scheduler.request import FinishKind, Request, make_requests
from freehold.scheduler.scheduler import PauseMode
from freehold.scheduler.states import TRANSITIONS, Event, ImpossibleEvent, RequestState
from freehold.simulation.assembly import SimulatedModel
from freehold.simulation.engine import TORN
from harness import Harness


def harness(**options) -> Harness:
    return Harness(EngineConfig(**{"page_size": 4, "num_pages": 100, "max_running_requests": 8, **options}))


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.mark.parametrize(("state", "event"), itertools.product(RequestState, Event))
def test_every_cell_of_the_table_is_handled_or_impossible(state, event):
    request = Request("r", prompt=[], params=greedy(1), state=state)
    if (state, event) in TRANSITIONS:
        request.transition(event, 1.0)
        assert request.state is TRANSITIONS[state, event]
        assert request.seconds_in == {state: 1.0}
    else:
        with pytest.raises(ImpossibleEvent, match=state.value):
            request.transition(event, 1.0)
        assert request.state is state


def test_a_request_times_out_wherever_it_is():
    h = harness(max_running_requests=1)
    now = [0.0]
    h.scheduler.lifecycle.clock = lambda: now[0]
    running = h.submit(list(range(10)), greedy(50))
    running.timeout = None
    waiting = Request("w", prompt=h.submit([1], greedy(1)).prompt, params=greedy(5), timeout=2.0)
    h.scheduler.add(waiting)
    h.step()
    now[0] = 2.5
    h.step()
    assert waiting.finish.kind is FinishKind.TIMEOUT
    assert waiting.finish.message == "timed out after 2 s"
    assert running.finish is None
    h.run()


def test_waiting_and_running_have_limits_of_their_own():
    h = harness(max_running_requests=1, waiting_timeout=2.0, running_timeout=5.0)
    now = [0.0]
    h.scheduler.lifecycle.clock = lambda: now[0]
    running, waiting = h.submit(list(range(10)), greedy(60)), h.submit([1], greedy(1))
    for now[0] in (0.0, 1.9):
        h.step()
    assert waiting.finish is None
    now[0] = 2.0
    h.step()
    assert waiting.finish.message == "timed out in the waiting queue after 2 s"
    assert running.finish is None, "it was scheduled in time"
    now[0] = 5.0
    h.step()
    assert running.finish.message == "timed out running after 5 s"
    h.run()


def test_the_default_timeout_is_the_configured_one():
    h = harness(request_timeout=3.0)
    assert h.submit([1, 2], greedy(1)).timeout == 3.0


def test_a_more_important_request_preempts_and_the_other_resumes_with_its_output():
    h = harness(max_running_requests=1, schedule_policy="priority", priority_scheduling_preemption_threshold=2)
    low = h.submit(list(range(20)), greedy(40), priority=0)
    for _ in range(10):
        h.step()
    near = h.submit([5, 6], greedy(3), priority=1)
    high = h.submit([7, 8], greedy(3), priority=2)
    while high.finish is None:
        h.step()
    assert near.finish is None, "one is not enough of a difference"
    assert low.transitions[RequestState.RUNNING, Event.PREEMPTED] == 1
    h.run()
    assert len(low.output) == 40


def test_preemption_for_nothing_does_not_happen():
    """The important request would not fit even if everybody of less importance went."""
    h = harness(num_pages=20, schedule_policy="priority", priority_scheduling_preemption_threshold=1)
    equal = h.submit(list(range(40)), greedy(30), priority=5)
    low = h.submit([1, 2, 3], greedy(5), priority=0)
    for _ in range(3):
        h.step()
    h.submit(list(range(100, 160)), greedy(10), priority=5)
    for _ in range(3):
        h.step()
    assert low.retractions == equal.retractions == 0
    h.run()


def heard(h: Harness, request: Request) -> tuple:
    """What the engine hears when the request takes a row, besides its tokens."""
    steps = []
    h.engine.observe = steps.append
    while not steps or not steps[-1].row_starts:
        h.step()
    (start,) = steps[-1].row_starts
    assert start.row == request.lease.row
    assert start.tokens.tolist() == request.tokens.tolist()
    assert (start.params, start.seed, start.namespace) == (request.params, request.seed, request.namespace)
    assert (start.adapter, start.grammar) == (request.adapter, request.grammar)
    return start.prompt_length, start.stop_tokens, start.max_length, start.cached, start.scored_from, start.pooled_from


@pytest.mark.parametrize(
    ("asked", "stops", "first", "second"),
    [
        ({}, (3, 5, 9), (NOT_SCORED, NOT_SCORED), (NOT_SCORED, NOT_SCORED)),
        ({"ignore_eos": True}, (9,), (NOT_SCORED, NOT_SCORED), (NOT_SCORED, NOT_SCORED)),
        ({"logprobs": 1, "prompt_logprobs_start": 10}, (3, 5, 9), (10, NOT_SCORED), (NOT_SCORED, NOT_SCORED)),
        ({"pooling": "mean"}, (3, 5, 9), (NOT_SCORED, 0), (NOT_SCORED, NOT_SCORED)),
        ({"pooling": "last"}, (3, 5, 9), (NOT_SCORED, 20), (NOT_SCORED, NOT_SCORED)),
    ],
)
def test_the_engine_hears_all_of_a_request_each_time_it_takes_a_row(asked, stops, first, second):
    model = SimulatedModel(eos_tokens=(3, 5))
    h = Harness(EngineConfig(page_size=4, num_pages=100, max_running_requests=2), model=model)
    h.submit(list(range(100, 122)), greedy(1), namespace="salt")
    h.run()
    params = SamplingParams(temperature=0, max_tokens=30, min_tokens=20, stop_token_ids=(9,), **asked)
    prompt = np.arange(100, 121, dtype=np.int32)
    request = Request("all", prompt, params, seed=7, namespace="salt", adapter=None)
    h.scheduler.add(request)
    cached = min(20, *first) // 4 * 4
    assert heard(h, request) == (21, stops, 51, cached, *first)
    assert (request.cached_tokens, request.embedding) == (cached, None)
    while request.state is not RequestState.RUNNING:
        h.step()
    h.scheduler.pause(PauseMode.RETRACT)
    h.scheduler.resume()
    assert heard(h, request) == (21, stops, 51, (len(request.tokens) - 1) // 4 * 4, *second)
    h.run()


def test_what_important_requests_computed_is_evicted_last_by_priority():
    config = EngineConfig(page_size=4, num_pages=100, max_running_requests=2, eviction_policy="priority")
    h = Harness(config)
    for first, priority in ((100, 0), (200, 2), (300, 1)):
        h.submit(list(range(first, first + 9)), greedy(5), priority=priority)
        h.run()
    for left in (["high", "middle"], ["high"], []):
        h.memory.tree.evictor.evict(3, "a test")
        found = {name: h.memory.match("", np.arange(first, first + 9, dtype=np.int32)).length for name, first in
                 (("low", 100), ("high", 200), ("middle", 300))}  # fmt: skip
        assert [name for name, length in found.items() if length] == left


@pytest.mark.parametrize("overlap", [True, False])
def test_pausing_in_place_computes_nothing_and_keeps_everything(overlap):
    h = harness(disable_overlap_schedule=not overlap)
    request = h.submit(list(range(10)), greedy(30))
    for _ in range(5):
        h.step()
    h.scheduler.pause(PauseMode.IN_PLACE)
    lease, steps = request.lease, h.engine.steps_run
    h.step()  # delivers what was in flight
    late = h.submit([1, 2, 3], greedy(2))
    assert not h.scheduler.has_work
    for _ in range(20):
        assert not h.step().tokens
    assert h.engine.steps_run == steps
    assert request.lease is lease
    assert late.state is RequestState.WAITING
    assert "continued" in h.scheduler.waits_for()
    h.scheduler.resume()
    h.run()
    assert (len(request.output), request.retractions) == (30, 0)


def test_pausing_with_retraction_gives_back_all_memory_and_keeps_output():
    h = harness()
    requests = [h.submit(list(range(i, i + 10)), greedy(30)) for i in range(3)]
    for _ in range(5):
        h.step()
    h.scheduler.pause(PauseMode.RETRACT)
    assert all(request.state is RequestState.RETRACTED and len(request.output) > 2 for request in requests)
    assert h.memory.counts().lease == 0
    h.scheduler.resume()
    h.run()
    assert all(len(request.output) == 30 for request in requests)


def test_pausing_with_abort_ends_all():
    h = harness()
    request = h.submit(list(range(10)), greedy(30))
    h.step()
    h.scheduler.pause(PauseMode.ABORT)
    h.step()
    assert request.finish.kind is FinishKind.ABORT
    assert not h.scheduler.has_work


def test_abort_says_where_it_hit():
    h = harness(max_running_requests=1)
    running, waiting = h.submit([1, 2], greedy(9)), h.submit([3, 4], greedy(9))
    h.step()
    h.scheduler.abort_all()
    h.step()
    assert (running.finish.message, waiting.finish.message) == ("Aborted", "Abort in waiting queue")


def test_new_weights_retract_and_forget():
    h = harness()
    request = h.submit(list(range(40)), greedy(30))
    for _ in range(5):
        h.step()
    h.scheduler.update_weights("other")
    assert request.state is RequestState.RETRACTED
    assert h.memory.counts().free == h.memory.shape.page_count
    h.run()
    again = h.submit(list(range(40)), greedy(1))
    h.run()
    assert again.cached_tokens == 36, "what the new weights computed is found"


@pytest.mark.parametrize(
    ("source", "message"),
    [("alien", "another model's"), ("torn", "torn can't be loaded: half a file"), ("file", "no such file")],
)
def test_weights_that_can_not_be_loaded_are_refused_with_their_name(source, message, monkeypatch):
    monkeypatch.setitem(TORN, "file", OSError("no such file"))
    h = harness()
    with pytest.raises(BadRequest, match=f"^model_path: {message}$|^{message}$"):
        h.scheduler.update_weights(source)
    assert "weights" not in h.scheduler.waits_for()


def test_while_weights_are_loaded_nothing_is_computed(monkeypatch):
    h, weights = harness(), Future()
    monkeypatch.setattr(h.engine, "load_weights", lambda source: weights)
    monkeypatch.setattr("freehold.scheduler.scheduler.RESULT_WAIT_S", 0.0)
    request = h.submit(list(range(8)), greedy(4))
    update = h.scheduler.updating_weights("other")
    next(update)
    for _ in range(3):
        h.step()
        next(update)
    assert h.memory.epochs.submitted == 0
    weights.set_result(b"other")
    assert next(update, "ended") == "ended"
    h.run()
    assert len(request.output) == 4


def test_a_story_of_seconds_and_misses():
    h = harness()
    now = itertools.count()
    h.scheduler.lifecycle.clock = lambda: float(next(now))
    request = h.submit(list(range(10)), greedy(5))
    h.run()
    assert set(request.seconds_in) == {RequestState.WAITING, RequestState.PREFILLING, RequestState.RUNNING}
    assert "0 of 10 tokens cached; no sequence that continues like this" in request.miss
    assert [state for state, _ in request.transitions] == list(request.seconds_in)
    times = np.array([request.arrival, request.first_scheduled, request.first_token, request.ended], np.float64)
    assert (np.diff(times) > 0).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_samples_are_requests_with_seeds_of_their_own(count):
    prompt = np.arange(5, dtype=np.int32)
    requests = make_requests("r", prompt, SamplingParams(n=count, seed=7))
    assert [request.id for request in requests] == (["r"] if count == 1 else [f"r-{i}" for i in range(count)])
    assert [request.seed for request in requests] == [7 + i for i in range(count)]
    assert [request.params.n for request in requests] == [1] * count
    drawn = {request.seed for _ in range(20) for request in make_requests("r", prompt, SamplingParams(n=count))}
    assert len(drawn) == 20 * count
    assert 0 <= min(drawn) < max(drawn) < 2**63 + count


def test_what_a_hint_keeps_is_told():
    h = harness()
    prompt = np.arange(30, dtype=np.int32)
    for name, retention, kept in (("none", None, 0), ("all", Retention(), 32), ("part", Retention(end=10), 8)):
        request = Request(name, prompt, greedy(5), retention=retention)
        h.scheduler.add(request)
        h.run()
        assert request.retained_tokens == kept
