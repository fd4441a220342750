"""Requests in every stage of their lives, on the simulated engine."""

from dataclasses import replace

import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.contract.constraint import Constraint
from freehold.contract.errors import InvalidParameter, QueueFull
from freehold.contract.sampling_params import SamplingParams
from freehold.scheduler.request import FinishKind, Request, RequestState
from freehold.scheduler.scheduler import PauseMode
from freehold.simulation.assembly import SimulatedModel
from freehold.simulation.model import SimulatedGrammar, expected_output
from harness import Harness


def harness(**options) -> Harness:
    defaults = {"page_size": 4, "num_pages": 100, "max_running_requests": 8, "chunked_prefill_size": 16}
    return Harness(EngineConfig(**{**defaults, **options}), token_limit=options.pop("token_limit", 1000))


def greedy(max_tokens=8, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "synchronous"])


@OVERLAP
@pytest.mark.parametrize("stage", ["queued", "mid-chunk", "decoding"])
def test_abort_at_every_stage_returns_every_page(stage, overlap):
    h = harness(max_running_requests=1, disable_overlap_schedule=not overlap, disable_radix_cache=True)
    if stage == "queued":
        h.submit([5] * 40, greedy(50), "first")
        h.step()
    request = h.submit([7, *range(50)], greedy(4), "victim")
    if stage == "mid-chunk":
        h.step()
        assert request.state is RequestState.PREFILLING
        assert h.memory.counts().lease > 0
    while stage == "decoding" and request.state is not RequestState.RUNNING:
        h.step()
    assert h.scheduler.abort("victim")
    assert request.finish.kind is FinishKind.ABORT
    h.scheduler.abort_all()
    h.run()
    assert h.memory.counts().free == 100
    assert not h.scheduler.abort("victim"), "it is gone"


def test_abort_of_a_finished_request_whose_end_is_not_noticed_yet():
    """The engine has computed the last token; the scheduler has not taken the result in."""
    h = harness(disable_radix_cache=True)
    request = h.submit([7, *range(50)], greedy(4), "victim")
    running = h.scheduler.running
    while len(running) == 0 or running.most[request.lease.row] < 51 + 4:
        h.step()
    assert request.finish is None
    h.scheduler.abort("victim")
    h.run()
    assert request.finish.kind is FinishKind.ABORT
    assert h.memory.counts().free == 100


@OVERLAP
def test_a_late_found_finish_leaves_no_page_and_computes_nothing_twice(overlap):
    """The model's own stop token ends the request while the next step is already running."""
    h = harness(disable_overlap_schedule=not overlap)
    output = expected_output(h.submit([1, 2, 3], greedy(50), "x"), 50, 1000)
    h.scheduler.abort("x")
    h.run()
    stop = output[10]
    request = h.submit([1, 2, 3], greedy(50, stop_token_ids=(stop,)))
    h.run()
    assert request.output.tolist() == output[: output.index(stop) + 1]
    assert request.finish.matched == stop
    # The step in flight computed one token too many; nobody got it, and its page came back.
    assert h.memory.counts().lease == 0


@pytest.mark.parametrize("drafts", [0, 2, 6])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_nothing_is_allocated_for_a_request_that_is_known_to_finish(length, drafts):
    speculation = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": drafts} if drafts else {}
    h = harness(page_size=1, **speculation)
    request = h.submit([1, 2, 3], greedy(length))
    most = 0
    while h.scheduler.has_work:
        h.step()
        most = max(most, h.memory.shape.page_count - h.memory.counts().free)
    assert len(request.output) == length
    assert most == 3 + length - 1, "the last token needs no KV"


def test_requests_that_share_an_uncached_prefix_wait_for_the_first():
    h = harness(num_pages=200, chunked_prefill_size=64, max_running_requests=8)
    prefix = list(range(40))
    requests = [h.submit([*prefix, 900 + i], greedy(3)) for i in range(4)]
    h.run()
    assert requests[0].cached_tokens == 0
    assert [request.cached_tokens for request in requests[1:]] == [40, 40, 40]
    # and it is not kept from others meanwhile
    other = h.submit([999], greedy(1))
    h.run()
    assert other.finish.kind is FinishKind.LENGTH


def test_those_who_wait_for_a_prefix_go_on_when_its_request_is_aborted():
    h = harness(chunked_prefill_size=8)
    prefix = list(range(40))
    h.submit([*prefix, 1], greedy(3), "first")
    second = h.submit([*prefix, 2], greedy(3), "second")
    h.step()
    assert second.state is RequestState.WAITING
    h.scheduler.abort("first")
    h.run()
    assert second.finish.kind is FinishKind.LENGTH


def test_several_prompts_are_chunked_in_one_step_beside_decoding():
    h = harness(num_pages=400, chunked_prefill_size=32)
    decoding = h.submit([1, 2, 3], greedy(60))
    while decoding.first_token is None:
        h.step()
    h.submit([10] * 20, greedy(2), "a")
    h.submit([20] * 100, greedy(2), "b")
    steps = []
    execute = h.engine.execute
    h.engine.execute = lambda step: (steps.append(step), execute(step))[1]
    h.step()
    assert sorted(steps[0].counts.tolist()) == [1, 12, 20]
    h.run()


def test_memory_pressure_retracts_the_least_important_and_keeps_its_output():
    h = harness(num_pages=30, forward_retract_interval=0, chunked_prefill_size=64)
    h.scheduler.growth.share = 0.0
    requests = [h.submit([i] * 20, greedy(60), priority=0) for i in range(3)]
    h.run()
    assert requests[0].retractions == 0, "the first is never sent back"
    assert sum(request.retractions for request in requests) > 0
    assert all(len(request.output) == 60 for request in requests)


def test_a_prompt_is_scored_once_however_often_it_is_retracted():
    h = harness(chunked_prefill_size=8)
    request = h.submit(list(range(80)), greedy(3, logprobs=0, prompt_logprobs_start=2))
    for _ in range(3):
        known = len(request.prompt_logprobs)
        while len(request.prompt_logprobs) == known:
            h.step()
        h.scheduler.pause(PauseMode.RETRACT)
        assert request.state is RequestState.RETRACTED
        assert len(request.prompt_logprobs) < 77
        h.scheduler.resume()
    h.run()
    assert [one.token for one in request.prompt_logprobs] == list(range(3, 80))


def test_a_retracted_request_finds_its_own_prefix_again():
    h = harness(forward_retract_interval=4)
    request = h.submit(list(range(40)), greedy(30))
    computed = 0
    execute = h.engine.execute

    def count(step):
        nonlocal computed
        computed += int(step.counts.sum())
        return execute(step)

    h.engine.execute = count
    h.run()
    assert request.retractions >= 5
    assert request.cached_tokens == 0, "counted at first scheduling"
    assert computed < 40 + 30 + request.retractions * 8


def test_one_request_that_fills_all_memory_is_ended_and_the_rest_live():
    h = harness(num_pages=10)
    glutton = h.submit([1, 2], greedy(500))
    modest = h.submit([3, 4], greedy(5))
    h.run()
    assert glutton.finish.kind is FinishKind.ERROR
    assert "filled the KV memory of 40 tokens" in glutton.finish.message
    assert len(glutton.output) > 30
    assert modest.finish.kind is FinishKind.LENGTH


def test_without_max_tokens_the_output_is_what_fits():
    h = harness(num_pages=10)
    request = h.submit([1, 2], greedy(None))
    h.run()
    assert request.finish.kind is FinishKind.LENGTH
    assert len(request.output) == 39


@pytest.mark.parametrize("options", [{}, {"speculative_algorithm": "ngram"}, {"disable_overlap_schedule": True}])
def test_prompt_and_output_fill_the_context_to_the_last_token(options):
    h = Harness(EngineConfig(page_size=4, num_pages=100, chunked_prefill_size=16, **options), token_limit=40)
    requests = [h.submit([5] * length, greedy(None, ignore_eos=True)) for length in (1, 30, 38, 39)]
    h.run()
    assert [len(request.tokens) for request in requests] == [40] * 4


@pytest.mark.parametrize(
    ("prompt", "params", "field", "message"),
    [
        (0, greedy(), "prompt", "at least one token"),
        (1000, greedy(), "prompt", "maximum context length is 1000"),
        (500, greedy(), "prompt", "needs KV memory for 500 tokens, the whole pool holds 400"),
        (300, greedy(200, ignore_eos=True), "max_tokens", "needs KV memory for 499 tokens"),
        (300, greedy(300, min_tokens=150), "max_tokens", "needs KV memory for 449 tokens"),
    ],
)
def test_a_request_that_can_never_fit_is_refused_at_once(prompt, params, field, message):
    h = harness()
    with pytest.raises(InvalidParameter, match=message) as caught:
        h.submit([1] * prompt, params)
    assert caught.value.field == field
    assert not h.scheduler.has_work


@pytest.mark.parametrize(
    ("pages", "prompt", "params"),
    [
        (400, 999, greedy(5)),
        (100, 400, greedy(5)),
        (100, 300, greedy(101, ignore_eos=True)),
        (100, 300, greedy(300, min_tokens=101)),
        (100, 300, greedy(300, ignore_eos=True, stop=("<no>",))),
        (100, 300, greedy(None, ignore_eos=True)),
    ],
)
def test_a_request_that_just_fits_is_accepted_and_one_of_a_token_more_is_not(pages, prompt, params):
    h = harness(num_pages=pages)
    h.submit([1] * prompt, params)
    h.scheduler.abort_all()
    h.run()
    if params.min_tokens or (params.ignore_eos and params.max_tokens and not params.stop):
        more = replace(params, max_tokens=params.max_tokens + 1, min_tokens=params.min_tokens and params.min_tokens + 1)
        with pytest.raises(InvalidParameter, match="max_tokens: the request needs KV memory for 401 tokens"):
            h.submit([1] * prompt, more)
    elif prompt > 300:
        with pytest.raises(InvalidParameter, match="prompt: the "):
            h.submit([1] * (prompt + 1), params)


def test_a_full_queue_refuses_and_loses_nothing():
    h = harness(max_queued_requests=2)
    h.submit([1], greedy())
    h.submit([2], greedy())
    with pytest.raises(QueueFull, match="the limit is 2"):
        h.submit([3], greedy())
    assert len(h.run()) == 2


def test_an_id_in_use_is_refused():
    h = harness()
    h.submit([1], greedy(), "same")
    with pytest.raises(ValueError, match="already in flight"):
        h.submit([2], greedy(), "same")


@OVERLAP
def test_a_step_that_fails_ends_its_requests_and_no_others(overlap):
    h = harness(disable_overlap_schedule=not overlap)
    first = h.submit(list(range(20)), greedy(20))
    while first.first_token is None:
        h.step()
    h.engine.fail_next = MemoryError("no memory")
    h.run()
    assert first.finish.kind is FinishKind.ERROR
    assert "MemoryError: no memory" in first.finish.message
    after = h.submit(list(range(20)), greedy(5))
    h.run()
    assert after.finish.kind is FinishKind.LENGTH
    h.memory.flush()
    assert h.memory.counts().free == 100


def test_priority_goes_first_and_lpm_prefers_what_is_cached():
    h = harness(schedule_policy="priority", max_running_requests=1)
    for name, priority in (("low", 0), ("high", 5), ("middle", 3)):
        h.submit([1, 2], greedy(2), name, priority=priority)
    assert [request.id for request in h.run()] == ["high", "middle", "low"]

    h = harness(schedule_policy="lpm", max_running_requests=1)
    h.submit(list(range(40)), greedy(2), "warm")
    h.run()
    h.submit([500] * 20, greedy(2), "cold")
    h.submit([*range(40), 7], greedy(2), "cached")
    assert [request.id for request in h.run()] == ["warm", "cached", "cold"]


def test_ignore_eos_ignores_stop_token_ids_too():
    h = harness()
    probe = h.submit([1, 2, 3], greedy(10))
    h.run()
    stop = int(probe.output[4])
    for ignore_eos, length in ((False, 5), (True, 10)):
        params = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=(stop,), ignore_eos=ignore_eos)
        request = h.submit([1, 2, 3], params)
        h.run()
        assert len(request.output) == length


def test_stop_strings_are_found_across_tokens_and_not_before_min_tokens():
    h = harness()
    probe = h.submit([1, 2, 3], greedy(30))
    h.run()
    output = probe.output.tolist()
    stop = f"{output[4]}><{output[5]}"[1:]
    request = h.submit([1, 2, 3], greedy(30, stop=(stop,)))
    h.run()
    assert request.output.tolist() == output[:6]
    assert (request.finish.kind, request.finish.matched) == (FinishKind.STOP, stop)
    late = h.submit([1, 2, 3], greedy(30, stop=(stop,), min_tokens=7))
    h.run()
    assert late.output.tolist() == output


def test_namespaces_share_nothing():
    h = harness()
    first = h.submit(list(range(20)), greedy(2), namespace="a")
    h.run()
    second = h.submit(list(range(20)), greedy(2), namespace="b")
    h.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)


def test_the_simulated_engine_catches_wrong_kv():
    """The test that the tests can fail: one page of a running request is quietly exchanged."""
    from freehold.simulation.engine import WrongKV

    h = harness(disable_overlap_schedule=True)
    request = h.submit(list(range(20)), greedy(20))
    while request.first_token is None:
        h.step()
    row = request.lease.row
    table = h.engine._tables[0, row]
    table[:2] = table[1::-1].copy()
    with pytest.raises(WrongKV, match="position 0"):
        h.step()


# -- grammars ---------------------------------------------------------------------------------------------------------


def bound(h: Harness, grammar: SimulatedGrammar, name: str, **options) -> Request:
    params = greedy(30, constraint=Constraint("simulated", "regex"), **options)
    request = Request(name, np.arange(20, dtype=np.int32), params)
    request.grammar = grammar
    h.scheduler.add(request)
    return request


def bound_harness(**options) -> Harness:
    defaults = {"page_size": 4, "num_pages": 100, "max_running_requests": 8, "chunked_prefill_size": 16}
    return Harness(EngineConfig(**{**defaults, **options}), token_limit=1000, model=SimulatedModel(eos_tokens=(3,)))


SPECULATION = pytest.mark.parametrize(
    "options", [{}, {"speculative_algorithm": "ngram"}, {"forward_retract_interval": 2}]
)


@SPECULATION
def test_a_complete_text_ends_whatever_the_request_ignores(options):
    h = bound_harness(**options)
    requests = [bound(h, SimulatedGrammar(7, 5), f"bound {i}", ignore_eos=i > 0, min_tokens=10 * i) for i in range(3)]
    free = h.submit(list(range(20)), greedy(12, ignore_eos=True))
    h.run()
    for request in requests:
        assert len(request.output) == 6
        assert request.output[-1] == 3
        assert request.finish.kind is FinishKind.STOP
    assert len(free.output) == 12


@SPECULATION
@pytest.mark.parametrize("fails", [0, 4])
def test_a_grammar_that_can_not_be_followed_ends_its_request_alone(options, fails):
    h = bound_harness(**options)
    request = bound(h, SimulatedGrammar(7, 50, fails), "fails")
    beside = bound(h, SimulatedGrammar(9, 8), "beside")
    h.run()
    assert request.finish.kind is FinishKind.ERROR
    assert (request.finish.error.field, request.finish.error.status) == ("regex", 400)
    assert len(request.output) == fails
    assert beside.finish.kind is FinishKind.STOP
