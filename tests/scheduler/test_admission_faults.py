"""A fault in looking at one request ends that one, a fault in moving pages the engine. Each call is failed once."""

import sys
from types import FrameType

import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.contract.sampling_params import SamplingParams
from freehold.memory import LeaseError, PrefetchPolicy, WritePolicy
from freehold.scheduler.admission import Admission
from freehold.scheduler.loading import Loading
from freehold.scheduler.request import Request, RequestState
from freehold.simulation.assembly import SimulatedTiers
from harness import Harness

PROMPT = list(range(40))


# What the line runs through, and a constant.
FRAME = {
    "Admission._try_admit", "Admission._look_at", "Loading.prefetch", "Loading.go_on", "Loading._prefetch",
    "Storage.patience",
}  # fmt: skip


class ToldToFail(Exception):
    """The n-th call."""


class CallFault:
    """Raises at the n-th call, if there are so many, of functions of memory and scheduler while a request is tried, or
    during another method."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception] = ToldToFail,
        owner: type = Admission, method: str = "_try_admit",
    ):  # fmt: skip
        self.number, self.error = number, error
        self.calls: list[str] = []
        self.failed: str | None = None
        self._depth = 0
        tried = getattr(owner, method)

        def trying(*arguments):
            if arguments[1].id != "new":
                return tried(*arguments)
            before = sys.getprofile()
            sys.setprofile(self._call)
            try:
                return tried(*arguments)
            finally:
                sys.setprofile(before)

        monkeypatch.setattr(owner, method, trying)

    def _call(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        name = f"{code.co_filename.rpartition('/freehold/')[2]}:{code.co_qualname}"
        if event != "call" or not name.startswith(("memory/", "scheduler/")) or "<" in code.co_name:
            return
        if code.co_qualname in FRAME:
            return
        if self.failed is not None:
            return
        self.calls.append(name)
        if len(self.calls) == self.number:
            self.failed = name
            raise self.error(f"{name} was told to fail")


def busy() -> Harness:
    """A request runs, and a session has left a tail; beside it lies on the host what its next turn could use."""
    config = EngineConfig(page_size=4, num_pages=64, max_running_requests=8, chunked_prefill_size=64)
    tiers = SimulatedTiers(WritePolicy.WRITE_THROUGH, 4.0, prefetch_policy=PrefetchPolicy.TIMEOUT)
    h = Harness(config, token_limit=400, tiers=tiers)
    for session, prompt in (("other", [*PROMPT, *range(100, 120)]), ("s", PROMPT[:30])):
        h.scheduler.add(turn(f"first-{session}", prompt, session))
        while h.scheduler.has_work:
            h.mover.finish()
            h.step()
        h.memory.tree.evictor.evict(64, "a test")
    h.submit([7] * 30, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), name="running")
    while not len(h.scheduler.running):
        h.mover.finish()
        h.step()
    return h


def turn(name: str, prompt: list[int], session: str | None) -> Request:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    return Request(name, np.array(prompt, np.int32), params, session=session)


def run_on(h: Harness) -> None:
    while h.scheduler.has_work:
        h.mover.finish()
        h.step()


# In these something is moved; all before them only look.
JOINED = "memory/tiers/storage.py:Storage.join"
MOVES = {"scheduler/loading.py:Loading.begin", "scheduler/admission.py:Admission._lease"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["turn with a load", "prompt"])
def test_every_call_of_an_admission_fails_once(kind, monkeypatch):
    prompt, session = ([*PROMPT, *range(100, 110)], "s") if kind == "turn with a load" else ([9] * 21, None)
    ended_one = ended_all = 0
    for number in range(1, 2000):
        h = busy()
        with monkeypatch.context() as patch:
            fault = CallFault(patch, number)
            h.scheduler.add(turn("new", prompt, session))
            try:
                while h.scheduler.has_work and fault.failed is None:
                    h.mover.finish()
                    h.step()
            except ToldToFail:
                assert MOVES & set(fault.calls), f"{fault.failed} moves nothing, and ended the engine"
                ended_all += 1
                continue
        if fault.failed is None:
            break
        ended_one += 1
        assert not MOVES & set(fault.calls) or kind != "prompt", fault.failed
        run_on(h)
        new = next(request for request in h.ended if request.id == "new")
        assert new.finish.error is not None
        assert "told to fail" in new.finish.message
        others = [request for request in h.ended if request.id != "new"]
        assert all(request.finish.kind == "length" for request in others), "another request suffered"
        h.memory.audit()
    assert ended_one > 10
    assert ended_all > 10


@pytest.mark.parametrize("joins", [False, True])
def test_every_call_of_looking_for_a_prefetch_fails_once(joins, monkeypatch):
    """When a request comes; and when the prefetch of another sequence, which it has joined, is over."""
    method = "go_on" if joins else "prefetch"
    ended_one = ended_all = 0
    for number in range(1, 2000):
        h = busy()
        if joins:
            h.scheduler.add(turn("before", [9] * 21, None))
        with monkeypatch.context() as patch:
            fault = CallFault(patch, number, owner=Loading, method=method)
            try:
                h.scheduler.add(turn("new", [9] * 20 + [8] * 9, None))
                while h.scheduler.has_work and fault.failed is None:
                    h.mover.finish()
                    h.step()
            except ToldToFail:
                assert JOINED in fault.calls, f"{fault.failed} moves nothing, and ended the engine"
                ended_all += 1
                continue
        if fault.failed is None:
            break
        ended_one += 1
        assert JOINED not in fault.calls, fault.failed
        run_on(h)
        kinds = {request.id: request.finish.kind.value for request in h.ended}
        assert kinds.pop("new") == "error"
        assert set(kinds.values()) == {"length"}, "another request suffered"
        assert not h.memory.tiers.storage._underway
        h.memory.audit()
    assert ended_one > 10
    assert ended_all > 3


@pytest.mark.parametrize("error", [LeaseError, AssertionError])
def test_a_broken_invariant_ends_the_engine_wherever_it_is_found(error, monkeypatch):
    h = busy()
    CallFault(monkeypatch, 3, error)
    h.scheduler.add(turn("new", PROMPT, None))
    with pytest.raises(error, match="told to fail"):
        run_on(h)


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_request_that_can_not_be_looked_up_does_not_stop_those_behind_it(policy, monkeypatch):
    config = EngineConfig(page_size=4, num_pages=64, max_running_requests=2, schedule_policy=policy)
    h = Harness(config, token_limit=400)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for number in range(6):
        h.submit([number] * 9, greedy, client="one" if number < 3 else "two")
    cursed = h.scheduler.requests["r4"]
    look_up = h.memory.look_up

    def look_up_or_fail(salt, tokens, *rest, **named):
        if tokens is cursed.tokens:
            raise RuntimeError("told to fail")
        return look_up(salt, tokens, *rest, **named)

    monkeypatch.setattr(h.memory, "look_up", look_up_or_fail)
    h.run()
    kinds = {request.id: request.finish.kind.value for request in h.ended}
    assert kinds == {f"r{number}": "error" if number == 4 else "length" for number in range(1, 7)}
    assert cursed.state is RequestState.ENDED
    assert cursed.finish.error.status == 500


def test_a_fault_in_looking_for_stops_ends_one_request(monkeypatch):
    h = Harness(EngineConfig(page_size=4, num_pages=64), token_limit=400)
    bad = h.submit([1] * 9, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=("never",)))
    good = h.submit([2] * 9, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    monkeypatch.setattr("freehold.scheduler.results.find_stop", lambda *arguments: 1 // 0)
    h.run()
    assert bad.finish.kind == "error"
    assert "ZeroDivisionError" in bad.finish.message
    assert good.finish.kind == "length"
