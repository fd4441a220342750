"""Calls in slices: none holds up an iteration, and each comes to its end."""

import sys
from functools import partial

import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.contract.errors import QueueFull
from freehold.ipc import protocol as msg
from freehold.ipc.adapter_loads import AdapterLoads
from freehold.ipc.jobs import JOBS_MAX, Jobs
from freehold.ipc.procedures import Procedures
from freehold.memory import BrokenInvariant, PrefetchPolicy, WritePolicy
from freehold.memory.ledger import owner
from freehold.runtime.storage_backend import StorageBackend
from freehold.scheduler.parked import Parked
from freehold.simulation.assembly import SimulatedTiers, assemble


class Clock:
    """Each slice takes `slice_s`."""

    def __init__(self, slice_s: float = 0.0):
        self.now, self.slice_s = 0.0, slice_s

    def __call__(self) -> float:
        return self.now

    def work(self, slices: int, done: list[str], name: str):
        for _ in range(slices):
            self.now += self.slice_s
            done.append(name)
            yield
        return name


def test_jobs_take_turns_and_stop_when_their_share_is_used_up():
    clock, done = Clock(0.0002), []
    jobs = Jobs(clock)
    results = [jobs.take(partial(clock.work, 4, done, name)) for name in "ab"]
    assert jobs.go_on()
    assert done == ["a", "b", "a"], "three slices of 0.2 ms are more than the share"
    while jobs.go_on():
        pass
    assert [result.result(0) for result in results] == ["a", "b"]
    assert "".join(done) == "abababab"
    assert len(jobs) == 0


def test_a_job_that_waits_has_no_turn_before_its_time():
    clock = Clock()
    jobs = Jobs(clock)

    def work():
        yield 0.05
        return clock.now

    result = jobs.take(work)
    assert jobs.rest_s == 0.0
    jobs.go_on()
    assert jobs.rest_s == pytest.approx(0.05)
    assert not jobs.go_on()
    clock.now = 0.06
    jobs.go_on()
    assert result.result(0) == 0.06
    assert jobs.rest_s == float("inf")


def test_there_are_only_so_many_jobs():
    jobs = Jobs(Clock())
    for _ in range(JOBS_MAX):
        jobs.take(iter_forever)
    assert isinstance(jobs.take(iter_forever).exception(0), QueueFull)
    assert jobs.take(lambda: "a value").result(0) == "a value"


def iter_forever():
    while True:
        yield


class Panic(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("no"), Panic("no")])
def test_what_a_job_raises_is_its_result(error):
    jobs = Jobs(Clock())
    result = jobs.take(partial(raising, error))
    jobs.go_on()
    assert result.exception(0) is error

    def fail():
        raise error

    assert jobs.take(fail).exception(0) is error


def test_a_job_that_is_cancelled_ends():
    clock, done = Clock(), []
    jobs = Jobs(clock)

    def work():
        try:
            while True:
                yield 0.05
        finally:
            done.append("cleaned up")

    result = jobs.take(work)
    jobs.go_on()
    result.cancel()
    clock.now = 0.06
    jobs.go_on()
    assert done == ["cleaned up"]
    assert len(jobs) == 0


def raising(error: BaseException):
    yield
    raise error


def test_a_broken_invariant_is_nothing_that_is_answered():
    jobs = Jobs(Clock())
    jobs.take(partial(raising, BrokenInvariant("no")))
    with pytest.raises(BrokenInvariant):
        jobs.go_on()


class Server:
    """Procedures of a memory with `prefixes` of two pages each, all of them on the host; or with one prefix of as many
    pages, on the device and in the host's index."""

    def __init__(self, prefixes: int, is_one: bool = False):
        config = EngineConfig(page_size=4, num_pages=2 * prefixes + 100, max_running_requests=8)
        tiers = SimulatedTiers(WritePolicy.WRITE_THROUGH, 2.0, prefetch_policy=PrefetchPolicy.TIMEOUT)
        server = assemble(config, 8 * prefixes + 100, tiers=tiers)
        self.tokens = np.arange(8 * prefixes, dtype=np.int32)
        self.scheduler, memory = server.scheduler, server.scheduler.memory
        self.procedures = Procedures(
            self.scheduler, StorageBackend(memory, None, None), Parked(None, lambda: None, config), AdapterLoads(None)
        )
        if is_one:
            self.publish(self.tokens)
            self.copy(next(node for node in memory.tree.nodes() if node.parent is not None))
        for number in range(0 if is_one else prefixes):
            self.publish(np.arange(8, dtype=np.int32) + 10 * number)

    def copy(self, node) -> None:
        """Without a transfer."""
        for pages in self.scheduler.memory.tiers.host.pages:
            pages.add(node.keys, pages.allocate(node.page_count, owner.transfer(1)), owner.transfer(1))

    def publish(self, tokens) -> None:
        memory = self.scheduler.memory
        lease = memory.leases.open(memory.match("", tokens))
        lease.extend(len(tokens))
        lease.commit(len(tokens))
        memory.publish(lease, tokens)
        lease.release()
        memory.leases.page_tables.take_updates()

    def call(self, procedure: str, argument=None):
        return self.procedures.start(msg.Call(1, procedure, argument))

    def look(self, procedure: str):
        argument = {"tokens": self.tokens.tobytes(), "namespace": "", "session": "", "timeout": 0.0}
        return self.call(procedure, argument)

    def calls_of_a_slice(self, work) -> int:
        """The most Python calls between two yields; calls into NumPy, of which each does much, count as one."""
        most = 0
        for _ in range(100_000):
            count = 0

            def seen(frame, event, arg):
                nonlocal count
                count += event in ("call", "c_call")

            sys.setprofile(seen)
            try:
                is_over = next(work, self) is self
            finally:
                sys.setprofile(None)
            most = max(most, count)
            if is_over:
                return most
        raise AssertionError("no end")


SLICED = {
    "memory": lambda server: server.call("memory"),
    "cache": lambda server: server.call("cache"),
    "flush": lambda server: server.call("flush"),
    "weights": lambda server: server.scheduler.memory.replacing_weights(b"others"),
    "audit": lambda server: server.scheduler.auditing(),
}
LOOKS = {name: lambda server, name=name: server.look(name) for name in ("save", "lookup", "miss", "prefetch")}
SIZES = (1000, 4000)


@pytest.mark.parametrize("is_one", [False, True], ids=["many prefixes", "one long prefix"])
@pytest.mark.parametrize("work", SLICED)
def test_no_slice_grows_with_the_cache(work, is_one):
    servers = [Server(size, is_one) for size in SIZES]
    most = [server.calls_of_a_slice(SLICED[work](server)) for server in servers]
    assert most[1] < 1.3 * most[0], f"calls of the longest slice: {most}"


@pytest.mark.parametrize("is_evicted", [False, True], ids=["", "on the host only"])
@pytest.mark.parametrize("work", LOOKS)
def test_no_slice_grows_with_the_sequence_that_is_asked_for(work, is_evicted):
    most = []
    for size in SIZES:
        server = Server(size, is_one=True)
        if is_evicted:
            tree = server.scheduler.memory.tree
            tree.evictor.evict(tree.page_count, "a test")
        most.append(server.calls_of_a_slice(LOOKS[work](server)))
    assert most[1] < 1.3 * most[0], f"calls of the longest slice: {most}"


def test_to_attach_storage_takes_no_longer_with_more_on_the_host():
    most = []
    for size in SIZES:
        server = Server(size, is_one=True)
        tiers = server.scheduler.memory.tiers
        tiers.detach()
        most.append(server.calls_of_a_slice(attaching(tiers)))
    assert most[1] < 1.3 * most[0], f"calls: {most}"


def attaching(tiers):
    tiers.attach(PrefetchPolicy.TIMEOUT)
    yield
    tiers.settle(0.0)


def test_an_order_has_a_place_however_many_jobs_there_are():
    jobs = Jobs(Clock())
    for _ in range(JOBS_MAX):
        jobs.take(iter_forever)
    order = jobs.take(iter_forever, is_order=True)
    assert not order.done()
    assert len(jobs) == JOBS_MAX + 1
