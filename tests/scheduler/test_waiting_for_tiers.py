"""Requests whose prefix is on the host: they wait for it where that pays, and never for long."""

from concurrent.futures import Future

import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.contract.adapter import Adapter
from freehold.contract.orders import Kind
from freehold.contract.sampling_params import SamplingParams
from freehold.memory import PinKind, PrefetchPolicy, WritePolicy
from freehold.memory.tiers.transfer import LATE_S
from freehold.scheduler.request import RequestState
from freehold.scheduler.scheduler import PauseMode
from freehold.simulation.assembly import SimulatedTiers
from freehold.simulation.mover import Faults, SimulatedStorage
from harness import Harness

PROMPT = list(range(40))
OTHER = Adapter("other", "other", None)


class Tiered(Harness):
    """With a host, and a clock that stands still. Copies end when the test says so."""

    def __init__(self, policy=WritePolicy.WRITE_THROUGH, prefetch=None, storage=None, token_limit=1000, **options):
        defaults = {"page_size": 4, "num_pages": 64, "max_running_requests": 8, "chunked_prefill_size": 64}
        self.now = 0.0
        tiers = SimulatedTiers(policy, 4.0, Faults(), prefetch, storage or SimulatedStorage())
        config = EngineConfig(**{**defaults, **options})
        super().__init__(config, token_limit=token_limit, tiers=tiers, clock=lambda: self.now)

    def ask(self, prompt=PROMPT, max_tokens=2, **options):
        return self.submit(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), **options)

    def run(self):
        """Until nothing is to do."""
        while self.scheduler.has_work or self.mover.pending:
            self.mover.finish()
            self.step()

    def fill(self, prompt=PROMPT):
        """A prompt on the host, and not on the device."""
        self.ask(prompt)
        self.run()
        self.memory.tree.evictor.evict(100, "a test")
        self.run()
        assert self.memory.match("", np.array([*prompt, 0], np.int32)).length == 0


def test_copies_that_end_while_nothing_runs_are_taken_in():
    h = Tiered()
    h.ask()
    while h.scheduler.has_work:
        h.step()
    pinned = h.memory.counts().pinned
    assert pinned > 0
    assert h.memory.awaits_transfers
    h.mover.finish()
    assert h.scheduler.has_work
    h.step()
    assert h.memory.counts().pinned == 0
    h.run()
    assert len(h.memory.tiers.host.pages[0]) == h.memory.tree.page_count, "the last page was not copied"


def test_what_the_last_step_published_is_copied_at_rest():
    h = Tiered()
    h.ask(max_tokens=1)
    h.step()
    h.step()
    while h.scheduler.has_work:
        h.step()
    assert len(h.mover.pending) == 1
    h.run()


@pytest.mark.parametrize("mode", list(PauseMode))
def test_copies_that_end_during_a_pause_are_taken_in(mode):
    h = Tiered()
    h.ask(max_tokens=20)
    for _ in range(4):
        h.step()
    h.scheduler.pause(mode)
    for _ in range(3):
        h.mover.finish()
        if h.scheduler.has_work:
            h.step()
    assert not h.memory.awaits_transfers
    assert [hold.node for hold in h.memory.tiers.holds] == []
    h.scheduler.resume()
    h.run()


def load_weights_for_ever(h):
    h.engine.load_weights = lambda source: Future()
    h.update = h.scheduler.updating_weights("others")
    next(h.update)


HOLDS = {
    "draining": lambda h: setattr(h.scheduler, "draining", True),
    "paused": lambda h: h.scheduler.pause(PauseMode.IN_PLACE),
    "loading weights": load_weights_for_ever,
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("hold", HOLDS)
def test_a_scheduler_that_is_held_takes_in_a_step_each_time_and_then_waits_for_copies(hold, overlap):
    h, waits = Tiered(disable_overlap_schedule=not overlap), []
    h.mover.wait = waits.append
    h.ask(max_tokens=30)
    for _ in range(3):
        h.step()
    HOLDS[hold](h)
    submitted, in_flight = h.memory.epochs.submitted, h.scheduler.in_flight_count
    assert in_flight == (hold == "draining" and overlap)
    for left in reversed(range(in_flight)):
        h.step()
        assert h.scheduler.in_flight_count == left
    assert h.mover.pending
    for _ in range(3):
        waits.clear()
        has_work = h.scheduler.has_work
        h.step()
        assert (len(waits), h.memory.epochs.submitted) == (has_work, submitted)


def turns(h, count):
    """So many iterations; what a copy pins it pins for two iterations after its end at most."""
    ended = set()
    for _ in range(count):
        h.now += 0.05
        if h.scheduler.has_work or h.memory.awaits_transfers:
            h.step()
        h.mover.advance()
        late = {one.order.number for one in h.memory.tiers.transfers} - h.mover.pending
        assert not late & ended
        ended = late
        pins = sum(node.pins[PinKind.BACKUP] for node in h.memory.tree.nodes())
        assert pins <= len(h.memory.tiers.transfers)


@pytest.mark.parametrize("steps", [500, pytest.param(5000, marks=pytest.mark.thorough)])
def test_copies_are_taken_in_while_a_row_only_decodes_then_60_s_of_rest_then_a_pause(steps):
    h = Tiered(num_pages=400, page_size=16, token_limit=6000)
    for number in range(8):
        h.ask([number, *PROMPT])
    request = h.ask(max_tokens=steps + 500)
    while any(one.id != request.id for one in h.scheduler.requests.values()):
        h.step()
    assert h.memory.awaits_transfers, "everything is being copied"
    turns(h, steps)
    assert request.state is RequestState.RUNNING
    assert not h.memory.awaits_transfers
    h.scheduler.abort(request.id)
    turns(h, 1200)  # what was published when the request ended is copied and settled at rest
    assert h.memory.counts().pinned == 0
    assert len(h.memory.tiers.host.pages[0]) == h.memory.tree.page_count
    h.ask([9, *PROMPT], max_tokens=30)
    h.step()
    h.step()
    h.scheduler.pause(PauseMode.IN_PLACE)
    assert h.scheduler.has_work, "what was published has to be copied"
    turns(h, 20)
    assert h.memory.tree.page_count == len(h.memory.tiers.host.pages[0])
    assert not h.memory.awaits_transfers
    h.scheduler.resume()
    h.run()


def test_a_prefix_comes_back_and_is_told_of():
    h = Tiered()
    h.fill()
    request = h.ask()
    h.run()
    assert request.cached_tokens == 36
    assert request.cached_by_tier == {"device": 0, "host": 36}
    assert h.ask().cached_by_tier == {"device": 0}


def test_a_slow_copy_is_not_a_stuck_engine():
    h = Tiered()
    h.fill()
    request = h.ask()
    for _ in range(300):
        h.step()
    assert request.state is RequestState.WAITING
    for _ in range(2):  # in two pieces
        assert request.state is RequestState.WAITING
        h.mover.finish()
        h.step()
    assert request.state is not RequestState.WAITING
    assert request.cached_tokens == 36
    h.run()


def test_nobody_waits_for_a_copy_that_is_late():
    h = Tiered()
    h.fill()
    request = h.ask()
    h.step()
    h.now += LATE_S[Kind.LOAD] + 0.01
    h.step()
    assert request.state is not RequestState.WAITING
    assert request.cached_tokens == 0
    h.run()


def test_an_abort_while_a_prefix_is_loaded_undoes_nothing():
    h = Tiered()
    h.fill()
    request = h.ask()
    h.step()
    assert h.mover.pending
    h.scheduler.abort(request.id)
    h.run()
    assert request.state is RequestState.ENDED
    assert h.memory.counts().pinned == h.memory.counts().transfer == 0
    assert h.ask().state is RequestState.WAITING
    h.run()


def test_two_requests_wait_for_one_load():
    h = Tiered()
    h.fill()
    one, two = h.ask(), h.ask([*PROMPT, 500])
    h.step()
    assert len(h.mover.pending) == 1
    h.run()
    assert one.cached_tokens == 36
    assert two.cached_tokens == 40


def test_loads_that_fail_are_not_tried_for_ever():
    h = Tiered()
    h.fill()
    h.mover._faults = Faults(failing=1.0)
    request = h.ask()
    for _ in range(20):
        h.step()
        h.mover.finish()
    assert request.state is RequestState.ENDED
    assert request.deeper.load_count == 2
    h.mover._faults = Faults()
    h.run()


def test_who_is_due_waits_for_no_load():
    h = Tiered(max_overtaken=2)
    h.fill()
    first = h.ask()
    h.step()
    assert first.state is RequestState.WAITING
    for number in range(3):
        h.ask([700 + number] * 10)
    for _ in range(6):
        h.step()
    assert first.state is not RequestState.WAITING
    assert first.cached_tokens == 0
    h.run()


def test_what_is_quicker_to_compute_is_not_loaded():
    """The mover is throttled, and the choice flips."""
    h = Tiered()
    h.fill()
    h.scheduler.loading._time.token = 0.001
    h.memory.tiers.loads._speeds.extend([1.0] * 2)
    slow = h.ask()
    h.step()
    assert slow.cached_tokens == 0
    h.run()
    h.memory.tree.evictor.evict(100, "a test")
    h.memory.tiers.loads._speeds.extend([1e-9] * 4)
    fast = h.ask()
    h.run()
    assert fast.cached_tokens == 36


def test_how_fast_copies_are_is_learned():
    h = Tiered()
    h.fill()
    assert not h.memory.tiers.loads._speeds
    h.ask()
    h.run()
    pieces = [8 * 4 * 8, 4 * 8]  # bytes
    assert list(h.memory.tiers.loads._speeds) == pytest.approx([0.001 / one for one in pieces])


def test_nobody_is_retracted_while_pages_are_on_their_way():
    """Old prefixes fill memory; two requests need it, and what is evicted for them is copied first."""
    h = Tiered(WritePolicy.WRITE_BACK, num_pages=24)
    for number in range(3):
        h.ask([600 + number] * 28)
        h.run()
    requests = [h.ask([800 + number] * 20, max_tokens=24) for number in range(2)]
    for _ in range(200):
        h.step()
        if h.memory.room.is_returning:
            assert not sum(request.retractions for request in requests)
            h.mover.finish()
    h.run()
    assert all(request.retractions == 0 for request in requests)


# -- storage ----------------------------------------------------------------------------------------------------


def restarted(policy=PrefetchPolicy.WAIT_COMPLETE, **options) -> Tiered:
    """A server whose storage has the prompt."""
    storage = SimulatedStorage()
    before = Tiered(prefetch=policy, storage=storage)
    before.ask(**options)
    before.run()
    assert storage.pages
    return Tiered(prefetch=policy, storage=storage)


@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("adapter", [None, Adapter("first", "first", None)])
def test_a_restart_starts_warm(salt, adapter):
    h = restarted(namespace=salt, adapter=adapter)
    request = h.ask(namespace=salt, adapter=adapter)
    strangers = [h.ask(namespace=salt + "other", adapter=adapter), h.ask(namespace=salt, adapter=OTHER)]
    h.run()
    assert request.cached_by_tier == {"device": 0, "storage": 36}
    assert (request.cached_tokens, request.loaded_tokens, request.fetched_tokens) == (36, 36, 36)
    assert [one.cached_tokens for one in strangers] == [0, 0]


def test_what_each_tier_had_is_told():
    """Of nine pages the device has three, the host three more, and storage the rest."""
    h = restarted()
    h.ask(PROMPT[:25], max_tokens=1)
    h.run()
    h.memory.tree.evictor.evict(3, "a test")
    request = h.ask()
    h.run()
    assert request.cached_by_tier == {"device": 12, "host": 12, "storage": 12}
    assert (request.cached_tokens, request.loaded_tokens, request.fetched_tokens) == (36, 24, 12)


def test_best_effort_does_not_wait():
    h = restarted(PrefetchPolicy.BEST_EFFORT)
    request = h.ask()
    h.step()
    assert request.state is not RequestState.WAITING
    assert request.cached_tokens == 0
    h.run()


def test_a_store_that_never_answers_is_waited_for_a_second():
    h = restarted(PrefetchPolicy.TIMEOUT)
    request = h.ask()
    for _ in range(150):
        h.step()
        h.now += 0.006
    assert request.state is RequestState.WAITING
    h.now += 0.2
    h.step()
    assert request.state is not RequestState.WAITING
    h.run()


def test_a_request_that_comes_after_hours_of_rest_waits_for_its_own_prefetch():
    h = restarted(PrefetchPolicy.TIMEOUT)
    h.now = 9999.0
    request = h.ask()
    h.step()
    assert request.state is RequestState.WAITING
    h.run()
    assert request.cached_tokens == 36


def test_an_abort_ends_a_prefetch():
    h = restarted()
    request = h.ask()
    h.step()
    h.scheduler.abort(request.id)
    h.run()
    assert h.mover.moved[Kind.FETCH] == 0
    assert all(pages.pool.free_count == pages.pool.capacity for pages in h.memory.tiers.host.pages)


def test_who_begins_alike_fetches_its_own_end():
    storage = SimulatedStorage()
    before = Tiered(prefetch=PrefetchPolicy.WAIT_COMPLETE, storage=storage)
    one, two = PROMPT, PROMPT[:20] + list(range(900, 920))
    for prompt in (one, two):
        before.ask(prompt)
        before.run()
    h = Tiered(prefetch=PrefetchPolicy.WAIT_COMPLETE, storage=storage)
    requests = [h.ask(one), h.ask(two)]
    h.run()
    assert [request.cached_tokens for request in requests] == [36, 36]


def test_nobody_gives_way_who_would_be_next_in_line():
    """While the first of each line waits for storage, whoever was sent back would have the place again at once."""
    h = Tiered(prefetch=PrefetchPolicy.TIMEOUT, max_running_requests=3, num_pages=300)
    running = [h.ask([client, *PROMPT], 200, client=f"client {client}") for client in (1, 1, 2)]
    while any(one.state is not RequestState.RUNNING for one in running):
        h.mover.finish()
        h.step()
    waiting = h.ask([5, *PROMPT], client="new")
    h.ask([6, *PROMPT], client="client 1")
    behind = h.ask([7, 8], client="new")
    assert h.scheduler.loading.is_awaited(waiting)
    assert not h.scheduler.loading.is_awaited(behind)
    for _ in range(10):
        h.step()
    assert [one.retractions for one in running] == [0, 0, 0]
    h.now += 1.1
    while waiting.state is RequestState.WAITING:
        h.step()
    assert sum(one.retractions for one in running) == 1
    h.run()


def test_keys_of_a_long_prompt_are_made_a_few_in_each_iteration_while_others_go_on(monkeypatch):
    h = Tiered(num_pages=600)
    prompt = list(range(400))
    h.fill(prompt)
    made = []
    monkeypatch.setattr("freehold.memory.tiers.reach.COLUMNS_AT_ONCE", 2)
    long = h.ask(prompt)
    also_long = h.ask([*prompt[:-1], 7])
    short = h.ask([1, 2, 3])
    before = 0
    while long.state is RequestState.WAITING and not h.mover.pending:
        h.step()
        keys = [request.deeper.keys.made for request in (long, also_long)]
        made.append(sum(keys) - before)
        before = sum(keys)
        assert h.scheduler.stuck is None
    assert max(made) <= 3, "many keys in one iteration"
    assert len(short.tokens) > 3, "a request that needs no keys waits for one that does"
    h.run()
    assert long.cached_by_tier["host"] == 396


@pytest.mark.parametrize("policy", [PrefetchPolicy.TIMEOUT, PrefetchPolicy.WAIT_COMPLETE])
def test_what_is_fetched_for_many_requests_is_not_evicted_before_they_run(policy):
    """Their prefixes are four times what the host has room for, and their fetches take longer than a request waits."""
    storage = SimulatedStorage()
    prompts = [[number, *PROMPT[1:]] for number in range(40)]
    before = Tiered(prefetch=policy, storage=storage, num_pages=200)
    for prompt in prompts:
        before.ask(prompt)
        before.run()
    h = Tiered(prefetch=policy, storage=storage, num_pages=24)
    requests = [h.ask(prompt) for prompt in prompts]
    while h.scheduler.has_work or h.mover.pending:
        h.mover.finish()
        h.step()
        h.now += 0.05
    found = sum(request.cached_by_tier.get("storage", 0) for request in requests)
    assert found >= 0.95 * 36 * len(requests), f"{found} tokens"
    assert h.now > 3
