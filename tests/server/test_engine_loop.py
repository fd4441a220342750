"""The loop of the engine process, on the simulated engine: whatever the engine does, clients are heard."""

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
import zmq

from freehold.config import EngineConfig
from freehold.contract.constraint import Constraint
from freehold.contract.errors import InvalidParameter
from freehold.contract.sampling_params import SamplingParams
from freehold.ipc import protocol as msg
from freehold.ipc.engine_process import TRANSFER_POLL_MS, EngineLoop
from freehold.ipc.jobs import JOBS_MAX
from freehold.memory import OwnershipError, WritePolicy
from freehold.memory.audit import NODES_AT_ONCE
from freehold.runtime.storage_backend import StorageBackend
from freehold.simulation.assembly import SimulatedTiers, assemble


class Client:
    """The other end of the loop's socket; the clock stands still until told."""

    def __init__(self, monkeypatch, tiers=None, grammars=None, **options):
        monkeypatch.setattr("freehold.ipc.engine_process.IDLE_POLL_MS", 0)
        monkeypatch.setattr("freehold.ipc.engine_process.RETRY_MS", 0)
        self.now = 0.0
        config = EngineConfig(**{"page_size": 4, "num_pages": 100, "max_running_requests": 8, **options})
        server = assemble(config, 1000, clock=lambda: self.now, tiers=tiers)
        self.mover = server.mover
        self.engine, self.scheduler, self.memory = server.engine, server.scheduler, server.memory
        context = zmq.Context.instance()
        theirs = context.socket(zmq.PAIR)
        port = theirs.bind_to_random_port("tcp://127.0.0.1")
        self._socket = context.socket(zmq.PAIR)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self.loop = EngineLoop(self.scheduler, theirs, 0, StorageBackend(self.memory, None, None), grammars=grammars)
        self.grammars = grammars

    def send(self, command: msg.Command) -> None:
        self._socket.send(msg.encode(command))

    def submit(self, name: str, prompt=(1, 2, 3), max_tokens: int = 50, **options) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        tokens = np.array(prompt, np.int32).tobytes()
        self.send(msg.Submit(name, tokens, params, 0, msg.Options(**options)))

    def reports(self, turns: int = 1) -> list[msg.Report]:
        found = []
        for _ in range(turns):
            self._socket.poll(5)
            self.loop.turn()
        while self._socket.poll(20):
            found.append(msg.decode_report(self._socket.recv()))
        return found

    def ended(self, turns: int = 1) -> list[str]:
        return [end.id for r in self.reports(turns) if isinstance(r, msg.Progress) for end in r.ended]

    def answers(self, turns: int = 1) -> list[msg.Reply]:
        return [report for report in self.reports(turns) if isinstance(report, msg.Reply)]


@pytest.fixture
def client(monkeypatch):
    return Client(monkeypatch)


def test_while_the_engine_hangs_aborts_timeouts_and_questions_are_heard(client):
    client.submit("slow", timeout=5.0)
    client.submit("aborted")
    client.reports(3)
    client.engine.hold = True
    client.reports(3)
    client.send(msg.Abort("aborted"))
    assert client.ended(2) == ["aborted"]
    client.now = 6.0
    assert client.ended(2) == ["slow"]
    client.send(msg.Call(1, "idle"))
    assert client.answers(2)[0].value is False


def test_an_order_waits_for_the_step_in_flight_and_nobody_waits_for_the_order(client):
    client.submit("a")
    client.submit("b", timeout=5.0)
    client.reports(4)
    client.engine.hold = True
    client.send(msg.Call(1, "pause", "in_place"))
    client.send(msg.Call(2, "resume"))
    client.now = 6.0
    assert not client.answers(5)
    assert "b" not in client.scheduler.requests, "its time was up"
    client.engine.hold = False
    assert [(answer.number, answer.failure) for answer in client.answers(5)] == [(1, None), (2, None)]
    assert client.scheduler.paused is None
    assert "a" in client.ended(80)


def test_an_order_to_an_engine_that_never_answers_is_answered(client):
    client.submit("a")
    client.reports(4)
    client.engine.hold = True
    client.send(msg.Call(1, "pause", "retract"))
    assert not client.answers(3)
    client.now = 1000.0
    (answer,) = client.answers(3)
    assert "no result for 300 s" in str(answer.failure.message)
    client.engine.hold = False
    assert "a" in client.ended(80), "nothing was paused"


def test_the_idle_audit_comes_in_slices_and_a_command_interrupts_it(monkeypatch):
    client = Client(monkeypatch, num_pages=4 * NODES_AT_ONCE, max_running_requests=64)
    for i in range(3 * NODES_AT_ONCE):
        client.submit(f"r{i}", prompt=[i] * 5, max_tokens=1)
    while client.scheduler.requests or not client.scheduler.memory.epochs.submitted:
        client.reports(10)
    slices = 0
    auditing = client.memory.auditing

    def counted():
        nonlocal slices
        for one in auditing():
            slices += 1
            yield one

    monkeypatch.setattr(client.memory, "auditing", counted)
    client.submit("last", prompt=[7] * 5, max_tokens=1)
    poll = client.loop._socket.poll
    left = [3]

    def interrupted(timeout):
        """Something comes after three slices."""
        left[0] -= 1
        return left[0] < 0 or poll(timeout)

    client.reports(3)
    assert slices > 3, "the whole audit ran"
    slices = 0
    client.submit("again", prompt=[8] * 5, max_tokens=1)
    client._socket.poll(20)
    while client.scheduler.has_work or client.loop._audit is None:
        client.loop._take_commands() if not client.scheduler.requests else client.loop._step()
    monkeypatch.setattr(client.loop._socket, "poll", interrupted, raising=False)
    client.loop._rest()
    assert 0 < slices <= 3
    assert client.loop._audit is not None, "the rest is done later"
    assert client.scheduler.audit_error is None


def test_an_audit_that_fails_is_told(client):
    client.submit("a", max_tokens=1)
    client.reports(6)
    client.memory.pools[0].owner[50] = 99
    client.submit("b", max_tokens=1)
    reports = client.reports(8)
    unwell = [r.stats.unwell for r in reports if isinstance(r, msg.Progress) and r.stats is not None]
    assert "page 50" in str(unwell[-1])


def test_copies_to_the_host_are_taken_in_while_the_engine_rests(monkeypatch):
    """Nobody asks for anything, and yet pages that were copied are given free."""
    tiers = SimulatedTiers(WritePolicy.WRITE_THROUGH, 1.0)
    client = Client(monkeypatch, tiers=tiers)
    client.submit("a", prompt=range(1, 30), max_tokens=4)
    while not client.ended():
        pass
    client.reports(2)
    pinned = client.memory.counts().pinned
    assert pinned > 0
    polls = []
    monkeypatch.setattr("freehold.ipc.engine_process.IDLE_POLL_MS", 10_000)
    monkeypatch.setattr(client.loop._poller, "poll", lambda milliseconds=None: polls.append(milliseconds) or [])
    client.loop.turn()
    assert polls == [TRANSFER_POLL_MS]
    client.mover.finish()
    client.loop.turn()
    client.loop.turn()
    assert client.memory.counts().pinned == 0


# -- grammars that are being compiled -------------------------------------------------------------------------------


class SlowGrammars:
    """Compiles when the test says so."""

    def __init__(self):
        self.futures = {}
        self.settled = 0

    def get(self, constraint):
        return self.futures.setdefault(constraint.grammar, Future())

    def settle(self):
        self.settled += 1


@pytest.fixture
def bound(monkeypatch):
    return Client(monkeypatch, grammars=SlowGrammars(), max_queued_requests=3, waiting_timeout=60.0)


def submit(client, name, grammar="start: /a/", **options):
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, constraint=Constraint(grammar, "regex"))
    client.send(msg.Submit(name, np.array([1, 2, 3], np.int32).tobytes(), params, 0, msg.Options(**options)))


def kinds(reports):
    return [type(report).__name__ for report in reports if not isinstance(report, msg.Progress)]


def test_a_request_waits_for_its_grammar_and_others_do_not(bound):
    submit(bound, "a")
    bound.submit("free", max_tokens=3)
    assert bound.ended(10) == ["free"]
    assert "a" not in bound.scheduler.requests
    bound.send(msg.Call(1, "idle"))
    assert bound.answers(2)[0].value is False, "a flush would have to wait for it"
    bound.grammars.futures["start: /a/"].set_result("compiled")
    reports = bound.reports(1)
    assert kinds(reports) == ["Accepted"]
    assert bound.scheduler.requests["a"].grammar == "compiled"
    assert bound.ended(10) == ["a"]
    submit(bound, "again")
    assert kinds(bound.reports(1)) == ["Accepted"], "it is there already"


def test_a_ready_grammar_wakes_the_loop(bound, monkeypatch):
    monkeypatch.setattr("freehold.ipc.engine_process.IDLE_POLL_MS", 20_000)
    monkeypatch.setattr(type(bound.loop), "_patience_ms", lambda self: 20_000)
    submit(bound, "a")
    bound.loop._take_commands()
    future = bound.grammars.futures["start: /a/"]
    threading.Timer(0.2, lambda: future.set_result("compiled")).start()
    before = time.monotonic()
    bound.loop._take_commands()
    assert time.monotonic() - before < 5
    bound.loop._admit_parked()
    assert "a" in bound.scheduler.requests


def test_a_grammar_that_can_not_be_compiled_is_refused(bound):
    submit(bound, "a")
    bound.reports(1)
    bound.grammars.futures["start: /a/"].set_exception(InvalidParameter("regex", "no"))
    (refused,) = [one for one in bound.reports(1) if isinstance(one, msg.Rejected)]
    assert (refused.id, refused.failure.error().field) == ("a", "regex")
    assert not bound.scheduler.requests
    bound.send(msg.Call(1, "idle"))
    assert bound.answers(2)[0].value is True


def test_a_request_that_waits_for_its_grammar_can_be_aborted(bound):
    submit(bound, "a")
    bound.reports(2)
    bound.send(msg.Abort("a"))
    assert bound.ended(2) == ["a"]
    bound.grammars.futures["start: /a/"].set_result("compiled")
    assert not kinds(bound.reports(2)), "nobody waits for it any more"


@pytest.mark.parametrize("seconds", [5.0, None])
def test_time_goes_on_while_a_grammar_is_compiled(bound, seconds):
    bound.now = 1.0
    submit(bound, "a", timeout=seconds)
    bound.reports(2)
    bound.now = 1.0 + (seconds or 60.0) - 0.1
    assert not bound.ended(2)
    bound.now += 0.2
    assert bound.ended(3) == ["a"]
    assert not bound.memory.epochs.submitted, "nothing was computed"


def test_time_that_was_waited_counts(bound):
    bound.now = 1.0
    submit(bound, "a", timeout=5.0)
    bound.reports(2)
    bound.now = 4.0
    bound.grammars.futures["start: /a/"].set_result("compiled")
    bound.engine.hold = True
    bound.reports(2)
    assert bound.scheduler.requests["a"].arrival == 1.0
    bound.now = 6.5
    assert bound.ended(2) == ["a"]
    bound.engine.hold = False


def test_requests_that_wait_for_grammars_are_as_many_as_the_queue_holds(bound):
    for name in ("a", "b", "c", "d"):
        submit(bound, name, f"start: /{name}/")
    (refused,) = [one for one in bound.reports(2) if isinstance(one, msg.Rejected)]
    assert (refused.id, refused.failure.error().status) == ("d", 503)


def test_without_grammars_constrained_output_is_refused(client):
    submit(client, "a")
    (refused,) = [one for one in client.reports(2) if isinstance(one, msg.Rejected)]
    assert refused.failure.error().field == "regex"
    assert "--grammar-backend none" in refused.failure.message


def test_what_is_held_back_comes_before_an_answer_and_before_rest(monkeypatch):
    """Whoever is told that generation has paused has heard of all tokens before."""
    client = Client(monkeypatch, stream_hold_ms=1e6)
    client.submit("a", max_tokens=300)
    client.reports(10)
    client.send(msg.Call(1, "pause", "in_place"))
    reports = client.reports(5)
    (answer,) = [at for at, report in enumerate(reports) if isinstance(report, msg.Reply)]
    told = [len(report.tokens) for report in reports if isinstance(report, msg.Progress)]
    assert sum(told[:answer]) > 0
    assert sum(told[answer:]) == 0
    known = client.scheduler.requests["a"]
    client.send(msg.Call(2, "resume"))
    client.reports(10)
    before = len(known.output)
    client.loop._tell()
    assert sum(len(one.tokens) for one in client.reports(0) if isinstance(one, msg.Progress)) > 0
    assert before < 300


# -- orders that take long, and those that fail -----------------------------------------------------------------------


@pytest.fixture
def loading(client, monkeypatch):
    """-> a client, and the future of weights that its engine is asked to load."""
    weights = Future()
    monkeypatch.setattr(client.engine, "load_weights", lambda source: weights)
    monkeypatch.setattr("freehold.scheduler.scheduler.RESULT_WAIT_S", 0.0)
    return client, weights


def test_while_weights_are_loaded_nothing_is_computed_and_everybody_is_heard(loading, monkeypatch):
    client, weights = loading
    monkeypatch.setattr("freehold.ipc.engine_process.HEARTBEAT_S", 0.0)
    client.submit("a")
    client.reports(6)
    client.send(msg.Call(1, "update_weights", "other"))
    client.submit("b", timeout=5.0)
    client.send(msg.Call(2, "resume"))
    client.send(msg.Call(3, "idle"))
    assert [answer.number for answer in client.answers(5)] == [3]
    steps = client.memory.epochs.submitted
    beats = [report for report in client.reports(5) if isinstance(report, msg.Progress) and report.stats is not None]
    assert len(beats) >= 5, "a sign of life in each turn"
    client.now = 6.0
    assert "b" in client.ended(3), "its time is up"
    assert client.memory.epochs.submitted == steps, "nothing is computed with weights that are half there"
    assert beats[-1].stats.unwell is None
    client.now = 1000.0
    client.reports(2)
    assert "weights to be loaded from other" in client.scheduler.stuck
    weights.set_result(b"new")
    assert [(answer.number, answer.failure) for answer in client.answers(4)] == [(1, None), (2, None)]
    assert client.scheduler.stuck is None
    assert client.memory.tree.weights != 0
    assert "a" in client.ended(80)


def test_while_weights_are_loaded_the_loop_rests(loading, monkeypatch):
    client, weights = loading
    client.submit("a")
    client.reports(6)
    for number, procedure in enumerate(("update_weights", "pause")):
        client.send(msg.Call(number, procedure, "in_place"))
    client.reports(3)
    monkeypatch.setattr("freehold.scheduler.scheduler.RESULT_WAIT_S", 9.0)
    monkeypatch.setattr("freehold.ipc.engine_process.IDLE_POLL_MS", 10_000)
    client.loop.turn()
    polls = []
    monkeypatch.setattr(client.loop._poller, "poll", lambda milliseconds=None: polls.append(milliseconds) or [])
    client.loop.turn()
    client.loop.turn()
    assert polls == [50, 50], "a request that waits can time out meanwhile"
    weights.set_result(b"new")


def test_an_order_waits_for_no_place_among_the_jobs(loading):
    """Calls that wait can be as many as there may be: an order is carried out, and others go on computing."""
    client, weights = loading
    client.submit("a", max_tokens=300)
    client.reports(4)
    for _ in range(JOBS_MAX):
        client.loop._jobs.take(lambda: (0.05 for _ in iter(int, 1)))
    client.send(msg.Call(1, "pause", "in_place"))
    client.send(msg.Call(2, "resume"))
    client.send(msg.Call(3, "update_weights", "other"))
    weights.set_result(b"new")
    assert [(answer.number, answer.failure) for answer in client.answers(10)] == [(1, None), (2, None), (3, None)]
    steps = client.memory.epochs.submitted
    client.reports(10)
    assert client.memory.epochs.submitted > steps


class Panic(BaseException):
    """What a library in Rust raises: no Exception."""


@pytest.mark.parametrize("error", [RuntimeError("a header"), Panic("a header"), MemoryError("a header")])
def test_what_a_library_raises_answers_the_call_and_ends_nothing(loading, error, monkeypatch):
    client, weights = loading
    before = client.memory.tree.weights
    client.send(msg.Call(1, "update_weights", "half"))
    assert not client.answers(3)
    weights.set_exception(error)
    (answer,) = client.answers(3)
    assert "a header" in answer.failure.message
    assert client.memory.tree.weights == before

    def fail(_):
        raise error

    monkeypatch.setitem(client.loop._procedures._procedures, "cache", fail)
    client.send(msg.Call(2, "cache"))
    (answer,) = client.answers(2)
    assert "a header" in answer.failure.message
    client.submit("a", max_tokens=2)
    assert client.ended(8) == ["a"]


@pytest.mark.parametrize("error", [OwnershipError("page 3"), AssertionError("page 3")])
def test_a_broken_invariant_in_a_procedure_ends_the_engine(client, error, monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setitem(client.loop._procedures._procedures, "flush", fail)
    client.send(msg.Call(1, "flush"))
    with pytest.raises(type(error), match="page 3"):
        client.reports(3)


def test_a_thread_that_panics_answers_the_call(client, monkeypatch):
    future = Future()
    monkeypatch.setitem(client.loop._procedures._procedures, "load_adapter", lambda _: future)
    client.send(msg.Call(1, "load_adapter", {}))
    assert not client.answers(2)
    future.set_exception(Panic("a header"))
    (answer,) = client.answers(2)
    assert "a header" in answer.failure.message


@pytest.mark.parametrize("procedure", ["pin", "page"])
def test_a_fault_of_ours_is_not_called_a_bad_request(client, procedure, monkeypatch):
    arguments = {
        "pin": {"id": "p", "namespace": "", "tokens": np.arange(8, dtype=np.int32).tobytes(), "ttl": None},
        "page": {"page": 1, "group": 0},
    }
    for wrong in (False, True):
        if wrong:
            monkeypatch.setattr(client.memory.tree, "match", lambda *arguments: int("no number"))
            monkeypatch.setattr("freehold.memory.explain.owner.kind_of", lambda one: int("no number"))
        client.send(msg.Call(1, procedure, arguments[procedure]))
        (answer,) = client.answers(2)
        assert (answer.failure.status if answer.failure else None) == (500 if wrong else None)


def test_a_call_that_is_not_waited_for_any_more_ends_unanswered(client, monkeypatch):
    left = []

    def work(_):
        try:
            while True:
                yield
        finally:
            left.append("ended")

    monkeypatch.setitem(client.loop._procedures._procedures, "save", work)
    client.send(msg.Call(1, "save"))
    client.reports(2)
    client.send(msg.Cancel(1))
    client.send(msg.Cancel(2))
    assert not client.answers(3)
    assert left == ["ended"]
    assert len(client.loop._jobs) == 0


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [np.float32(1), 1 << 70, "\udc80", nested(20_000)], ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("procedure", ["cache", "pause"])
def test_a_value_that_can_not_be_sent_answers_the_call(client, value, procedure, monkeypatch):
    monkeypatch.setitem(client.loop._procedures._procedures, procedure, lambda _: value)
    client.send(msg.Call(1, procedure))
    (answer,) = client.answers(3)
    assert answer.failure is not None
    client.submit("a", max_tokens=2)
    assert client.ended(8) == ["a"]


def test_an_error_that_names_a_file_without_a_utf8_name_is_sent(client, monkeypatch):
    def fail(_):
        raise OSError(f"no such file: {bytes([0x61, 0x80]).decode(errors='surrogateescape')}")

    monkeypatch.setitem(client.loop._procedures._procedures, "cache", fail)
    client.send(msg.Call(1, "cache"))
    (answer,) = client.answers(3)
    assert "a\\udc80" in answer.failure.message
