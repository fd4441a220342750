"""Every container that outlives a step has the bound that docs/memory.md states, and keeps it."""

import re
from pathlib import Path

import numpy as np
import pytest
from census import Census

from freehold.config import EngineConfig
from freehold.errors import QueueFull
from freehold.memory import PrefetchPolicy, Retention, WritePolicy
from freehold.memory.events import EventLog
from freehold.sampling_params import SamplingParams
from freehold.scheduler.request import Request
from freehold.simulation.assembly import SimulatedTiers
from freehold.simulation.mover import Faults
from harness import Harness

DOCS = Path(__file__).parent.parent.parent / "docs" / "memory.md"
SMALL = 64  # a container that never has more entries needs no row in the table
PAGES, ROWS, QUEUED, TOKENS = 400, 32, 128, 64


def stated_bounds() -> dict[str, str]:
    """ "Class.attribute" -> the formula of its bound."""
    text = DOCS.read_text().split("<!-- bounds -->")[1].split("<!-- end of bounds -->")[0]
    rows = re.findall(r"^\| (.*?) \| `(.*?)` \|", text, re.MULTILINE)
    return {name: formula for names, formula in rows for name in re.findall(r"`(\w+\.\w+)`", names)}


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


KNOWN = {
    "pages": PAGES, "rows": ROWS, "queued": QUEUED, "tokens": TOKENS, "live": 2 * QUEUED + ROWS, "host": 2 * PAGES,
}  # fmt: skip
NOT_OURS = ("Simulated", "Vocabulary", "_Pending", "Order")  # what stands for the engine and for storage


def checked(h: Harness) -> Census:
    """All that the scheduler keeps, within the bounds."""
    census, bounds = Census(h.scheduler), stated_bounds()
    for where, entries in census.entries.items():
        if not where.startswith(NOT_OURS):
            limit = eval(bounds[where], {}, KNOWN) if where in bounds else SMALL
            assert entries <= limit, f"{where} has {entries} entries, the bound is {limit}"
    assert census.objects["Request"] <= 2 * QUEUED + ROWS
    assert census.objects["Node"] <= 2 * PAGES
    return census


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


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
@pytest.mark.parametrize("faults", [Faults(), Faults(slow=0.5, failing=0.1, never=0.02, seed=1)], ids=["well", "ill"])
def test_tiers_keep_no_more_than_the_bounds(policy, faults):
    tiers = SimulatedTiers(policy, 2.0, faults, PrefetchPolicy.TIMEOUT)
    h, rng = harness(tiers), np.random.default_rng(1)
    for first in range(0, 15_000, 3000):
        run_for(h, range(first, first + 3000), rng)
        checked(h)


@pytest.mark.timeout(200)
def test_a_hundred_thousand_requests_leave_no_more_than_the_bounds():
    h, rng = harness(), np.random.default_rng(0)
    sizes: list[int] = []
    for first in range(0, 100_000, 20_000):
        run_for(h, range(first, first + 20_000), rng)
        sizes.append(sum(checked(h).bytes.values()))
    h.scheduler.abort_all()
    h.scheduler.step()
    h.run()
    assert max(sizes[3:]) < 1.05 * sizes[2], f"bytes grow: {sizes}"
    left = Census(h.scheduler)
    assert left.objects["Request"] == 0, "ended requests are kept"


def test_every_bound_stated_is_of_something_that_exists():
    tiers = SimulatedTiers(WritePolicy.WRITE_THROUGH, 2.0, prefetch_policy=PrefetchPolicy.TIMEOUT)
    h, rng = harness(tiers), np.random.default_rng(0)
    for number in range(2000):
        submit(h, number, rng)
        if number % 20 == 0:
            h.scheduler.step()
    assert set(stated_bounds()) <= set(Census(h.scheduler).entries)
