"""Requests that wait for their grammar: until it is there, until it can't be, or until their time is up."""

from concurrent.futures import Future

import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.contract.constraint import Constraint
from freehold.contract.errors import InvalidParameter, QueueFull, Unavailable
from freehold.contract.sampling_params import SamplingParams
from freehold.scheduler.parked import Parked
from freehold.scheduler.request import Request


class Grammars:
    """Compiles when the test says so."""

    def __init__(self):
        self.asked: list[Future] = []
        self.settled = 0

    def get(self, constraint):
        self.asked.append(Future())
        return self.asked[-1]

    def settle(self):
        self.settled += 1


class Park:
    def __init__(self, **options):
        self.grammars, self.woken = Grammars(), 0
        self.parked = Parked(self.grammars, self.wake, EngineConfig(max_queued_requests=3, **options))

    def wake(self):
        self.woken += 1

    def park(self, name: str, waiting: int = 0, now: float = 0.0, timeout: float | None = None) -> Request:
        params = SamplingParams(constraint=Constraint("[7]", "regex"))
        request = Request(name, np.array([1], np.int32), params, timeout=timeout)
        assert self.parked.park(request, waiting, now)
        return request


def test_a_request_has_its_grammar_when_that_is_compiled():
    park = Park()
    first, second = park.park("first", now=3.0), park.park("second", now=4.0)
    assert (first.arrival, second.arrival, len(park.parked)) == (3.0, 4.0, 2)
    assert park.parked.ready(5.0) == []
    park.grammars.asked[1].set_result("grammar")
    assert park.woken == 1
    assert park.parked.ready(5.0) == [(second, None)]
    assert (second.grammar, first.grammar, len(park.parked)) == ("grammar", None, 1)
    assert park.grammars.settled == 2
    assert park.parked.take("first") is first
    assert park.parked.take("first") is None
    assert park.parked.ready(5.0) == []
    assert park.grammars.settled == 2, "no request waits"


def test_what_needs_no_compiling_does_not_wait():
    park = Park()
    assert not park.parked.park(Request("free", np.array([1], np.int32), SamplingParams()), 9, 0.0)
    done: Future = Future()
    park.grammars.get = lambda constraint: done
    done.set_result("grammar")
    request = Request("bound", np.array([1], np.int32), SamplingParams(constraint=Constraint("[7]", "regex")))
    assert not park.parked.park(request, 9, 0.0)
    assert (request.grammar, len(park.parked), park.parked.failure_count) == ("grammar", 0, 0)
    failed: Future = Future()
    park.grammars.get = lambda constraint: failed
    failed.set_exception(Unavailable("too large"))
    with pytest.raises(Unavailable, match="too large"):
        park.parked.park(request, 9, 0.0)
    assert park.parked.failure_count == 1
    with pytest.raises(InvalidParameter, match="regex: constrained output is switched off"):
        Parked(None, lambda: None, EngineConfig()).park(request, 0, 0.0)


def test_a_grammar_that_can_not_be_is_told_and_counted():
    park = Park()
    first, second = park.park("first"), park.park("second")
    error = InvalidParameter("regex", "nonsense")
    park.grammars.asked[0].set_exception(error)
    assert park.parked.ready(1.0) == [(first, error)]
    assert (first.grammar, park.parked.failure_count, len(park.parked)) == (None, 1, 1)
    park.grammars.asked[1].set_exception(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        park.parked.ready(1.0)
    assert second.grammar is None


def test_requests_that_wait_for_grammars_count_as_queued():
    park = Park()
    park.park("first", waiting=2)
    with pytest.raises(InvalidParameter, match="rid: request id first is already in flight"):
        park.park("first")
    with pytest.raises(QueueFull, match="3 requests are waiting"):
        park.park("second", waiting=2)
    park.park("second", waiting=1)


@pytest.mark.parametrize(
    ("options", "timeout", "limit"),
    [
        ({"request_timeout": 5.0}, None, 5.0),
        ({"request_timeout": 5.0}, 9.0, 9.0),
        ({"request_timeout": 9.0}, 5.0, 5.0),
        ({"waiting_timeout": 5.0}, 9.0, 5.0),
        ({"waiting_timeout": 9.0}, 5.0, 5.0),
        ({}, None, None),
    ],
)
def test_a_request_waits_for_a_grammar_no_longer_than_for_anything_else(options, timeout, limit):
    park = Park(**options)
    request = park.park("slow", now=100.0, timeout=timeout)
    assert park.parked.ready(100.0 + (limit or 1e9) - 0.001) == []
    late = park.parked.ready(100.0 + limit) if limit is not None else []
    assert late == ([(request, None)] if limit is not None else [])
    assert request.grammar is None
    assert len(park.parked) == (limit is None)
