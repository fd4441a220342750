"""Every container that outlives a step has the bound that docs/memory.md states, and keeps it."""

import re
from pathlib import Path

import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.contract.errors import QueueFull
from freehold.contract.sampling_params import SamplingParams
from freehold.memory import PrefetchPolicy, Retention, WritePolicy
from freehold.memory.events import EventLog
from freehold.memory.prefix.tree import PrefixTree
from freehold.scheduler import lifecycle
from freehold.scheduler.request import Request
from freehold.simulation.assembly import SimulatedTiers
from freehold.simulation.bounds import BOUNDS, Grown, check_bounds
from freehold.simulation.census import Census
from freehold.simulation.mover import Faults
from harness import Harness

DOCS = Path(__file__).parent.parent.parent / "docs" / "memory.md"
PAGES, ROWS, QUEUED, TOKENS = 400, 32, 128, 64


def test_the_docs_state_the_bounds():
    text = DOCS.read_text().split("<!-- bounds -->")[1].split("<!-- end of bounds -->")[0]
    rows = re.findall(r"^\| (.*?) \| `(.*?)` \|", text, re.MULTILINE)
    assert {name: formula for names, formula in rows for name in re.findall(r"`(\w+\.\w+)`", names)} == BOUNDS


def harness(tiers: SimulatedTiers | None = None) -> Harness:
    """With tiers there are followers, too."""
    config = EngineConfig(
        page_size=4,
        num_pages=PAGES,
        max_running_requests=ROWS,
        max_queued_requests=QUEUED,
        schedule_policy="lpm",
        cache_tenant_quota=0.3,
        request_timeout=3600.0,
    )
    return Harness(config, token_limit=TOKENS, tiers=tiers, events=None if tiers is None else EventLog(4))


def submit(h: Harness, number: int, rng: np.random.Generator) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, stop=("<no>",))
    prompt = rng.integers(0, 900, int(rng.integers(1, 40))).astype(np.int32)
    request = Request(f"r{number}", prompt, params, namespace=f"tenant {number % 5000}")
    request.client = f"client {number % 300}"
    request.session = f"session {number % 3000}" if number % 3 == 0 else None
    request.retention = Retention(50, ttl=1000.0) if number % 7 == 0 else None
    try:
        h.scheduler.add(request)
    except QueueFull:
        return
    if number % 5:
        h.scheduler.abort(request.id)


def checked(h: Harness) -> Census:
    """All that the scheduler keeps, within the bounds."""
    if h.memory.events is not None:
        h.memory.events.take()
    return check_bounds(h.scheduler, 2 * QUEUED + ROWS)


def run_for(h: Harness, numbers: range, rng: np.random.Generator) -> None:
    for number in numbers:
        submit(h, number, rng)
        if number % 100 == 99:
            h.scheduler.step()
            if h.mover is not None:
                h.mover.advance()
                h.memory.events.take()
        if number % 200 == 0:
            for name in range(number // 200 % 40):
                h.scheduler.forget_session(f"session {3 * name}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
@pytest.mark.parametrize("faults", [Faults(), Faults(slow=0.5, failing=0.1, never=0.02, seed=1)], ids=["well", "ill"])
def test_tiers_keep_no_more_than_the_bounds(policy, faults):
    tiers = SimulatedTiers(policy, 2.0, faults, PrefetchPolicy.TIMEOUT)
    h, rng = harness(tiers), np.random.default_rng(1)
    for first in range(0, 15_000, 3000):
        run_for(h, range(first, first + 3000), rng)
        checked(h)


@pytest.mark.parametrize(("count", "growth"), [(10_000, 1.15), pytest.param(100_000, 1.05, marks=pytest.mark.thorough)])
def test_many_requests_leave_no_more_than_the_bounds(count, growth):
    h, rng = harness(), np.random.default_rng(0)
    h.memory.tree.history.limit = 256  # full before the first measurement
    sizes: list[int] = []
    for first in range(0, count, count // 5):
        run_for(h, range(first, first + count // 5), rng)
        sizes.append(sum(checked(h).bytes.values()))
    h.scheduler.abort_all()
    h.scheduler.step()
    h.run()
    assert max(sizes[3:]) < growth * sizes[2], f"bytes grow: {sizes}"
    left = Census(h.scheduler)
    assert left.objects["Request"] == 0, "ended requests are kept"


def test_every_bound_is_of_something_that_exists():
    tiers = SimulatedTiers(WritePolicy.WRITE_THROUGH, 2.0, prefetch_policy=PrefetchPolicy.TIMEOUT)
    h, rng = harness(tiers), np.random.default_rng(0)
    for number in range(2000):
        submit(h, number, rng)
        if number % 20 == 0:
            h.scheduler.step()
    census = Census(h.scheduler)
    unseen = {"PageTables._log", "Backup._rescued", "FairSteps._next_last"}  # empty between two steps
    assert {name for name in BOUNDS if not name.startswith("Transfer.")} - set(census.entries) <= unseen


def keep_what_has_left(monkeypatch):
    remove_tail = PrefixTree.remove_tail

    def remove_and_keep(tree, node, page_count):
        remove_tail(tree, node, page_count)
        tree._nodes[node.serial] = node

    monkeypatch.setattr(PrefixTree, "remove_tail", remove_and_keep)


def keep_deadlines_of_the_dead(monkeypatch):
    monkeypatch.setattr(lifecycle, "_is_alive", lambda request: True)


def run_on(h: Harness) -> None:
    rng = np.random.default_rng(0)
    for first in range(0, 12_000, 1000):
        run_for(h, range(first, first + 1000), rng)
        checked(h)


@pytest.mark.parametrize("plant", [keep_what_has_left, keep_deadlines_of_the_dead])
def test_a_container_that_keeps_too_much_is_found(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(Grown):
        run_on(harness())
