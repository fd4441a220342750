"""When tokens leave the engine's process."""

from dataclasses import dataclass, field

from freehold.config import EngineConfig
from freehold.contract.step import TokenLogprobs
from freehold.ipc.reports import HOLD_S, Reports, hold_seconds
from freehold.scheduler.request import Finish, FinishKind
from freehold.scheduler.results import StepOutput


@dataclass
class Sampled:
    """As much of a request as reports say."""

    id: str
    prompt: list[int] = field(default_factory=lambda: [1, 2])
    output: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish: Finish | None = None
    prompt_logprobs: list = field(default_factory=list)
    embedding: None = None
    first_scheduled: float = 1.0
    ended: float = 2.0
    arrival: float = 0.5
    retractions: int = 0
    drafted: int = 0
    accepted: int = 0
    retained_tokens: int = 0
    cached_by_tier: dict = field(default_factory=dict)


def sampled(*pairs, started=(), ended=(), logprobs=None) -> StepOutput:
    requests, tokens = [request for request, _ in pairs], [token for _, token in pairs]
    return StepOutput(requests, tokens, logprobs or {}, list(ended), list(started))


def test_tokens_wait_for_those_that_follow_but_not_longer_than_they_may():
    reports, a, b = Reports(0.01), Sampled("a"), Sampled("b")
    reports.add(sampled((a, 1)), 100.0)
    assert not reports.is_due(100.009)
    reports.add(sampled((a, 2), (b, 3)), 100.009)
    assert reports.is_due(100.0101), "the first has waited long enough"
    progress = reports.take()
    assert (progress.ids, progress.tokens) == (["a", "a", "b"], [1, 2, 3])
    assert not reports.is_due(200.0)
    assert reports.take() is None
    reports.add(sampled((a, 4)), 100.02)
    assert not reports.is_due(100.025), "those that follow have their own time"


def test_first_tokens_and_ends_leave_at_once_behind_what_was_held():
    reports, a, b = Reports(10.0), Sampled("a"), Sampled("b", cached_tokens=1)
    reports.add(sampled((a, 1)), 0.0)
    assert not reports.is_due(0.1)
    reports.add(sampled((b, 2), started=[b]), 0.1)
    assert reports.is_due(0.1)
    progress = reports.take()
    assert (progress.ids, progress.cached) == (["a", "b"], {"b": 1})
    a.finish = Finish(FinishKind.LENGTH)
    reports.add(sampled((a, 3)), 0.2)
    reports.add(sampled(ended=[a]), 0.3)
    assert reports.is_due(0.3)
    progress = reports.take()
    assert (progress.tokens, [end.id for end in progress.ended]) == ([3], ["a"])


def test_log_probabilities_stay_with_their_tokens():
    reports, a = Reports(1.0), Sampled("a")
    one, two = TokenLogprobs(1, -1.0, []), TokenLogprobs(3, -3.0, [])
    reports.add(sampled((a, 1), (a, 2), logprobs={0: one}), 0.0)
    reports.add(sampled((a, 3), logprobs={0: two}), 0.1)
    assert reports.take().logprobs == {0: one, 2: two}


def test_nobody_waits_where_a_core_is_free():
    assert hold_seconds(EngineConfig()) == HOLD_S
    assert hold_seconds(EngineConfig(num_threads=1)) == 0.0
    assert hold_seconds(EngineConfig(num_threads=1, stream_hold_ms=25)) == 0.025
    assert hold_seconds(EngineConfig(stream_hold_ms=0)) == 0.0
