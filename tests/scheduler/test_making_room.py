"""What was looked up before room was made is looked up again; and what a row will need is known before it is leased."""

import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.contract.sampling_params import SamplingParams
from freehold.memory import CacheGroup, WritePolicy
from freehold.memory.lease_table import LeaseTable
from freehold.scheduler.request import Request, RequestState
from freehold.simulation.assembly import SimulatedModel, SimulatedTiers
from harness import Harness

FULL = CacheGroup()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def turn(h: Harness, name: str, prompt: list[int], session: str | None = "s", max_tokens: int = 3) -> Request:
    request = Request(name, np.array(prompt, np.int32), greedy(max_tokens), session=session)
    h.scheduler.add(request)
    while h.scheduler.has_work or h.mover.pending:
        h.mover.finish()
        h.step()
    return request


@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_turn_whose_load_finds_no_room_goes_on_with_its_own_tail(policy, left):
    """Another session has computed what this turn will, and the host has it. Loading it would take more than there is,
    and room could be made of the turn's own tail."""
    config = EngineConfig(page_size=4, num_pages=16, max_running_requests=2, chunked_prefill_size=1)
    h = Harness(config, token_limit=64, tiers=SimulatedTiers(policy, 4.0))
    first = turn(h, "first", list(range(9)))
    ahead = [*first.tokens.tolist(), *range(50, 58)]
    turn(h, "ahead", [*ahead, 7], session="other")
    turn(h, "again", [*ahead, 7], session=None)
    h.memory.tails.forget("other")
    h.memory.tree.evictor.evict(h.memory.tree.page_count - 2, "a test")
    while h.scheduler.has_work or h.mover.pending:
        h.mover.finish()
        h.step()
    assert "s" in dict(h.memory.tails)
    ballast = h.memory.leases.open(h.memory.match("ballast", np.zeros(1, np.int32)))
    ballast.extend(4 * (h.memory.free_page_count - left))
    second = Request("second", np.array(ahead[:18], np.int32), greedy(1), session="s")
    h.scheduler.add(second)
    for _ in range(2):
        h.mover.finish()
        h.step()
    ballast.release()
    while h.scheduler.has_work or h.mover.pending:
        h.mover.finish()
        h.step()
    assert second.finish.kind == "length"
    assert (second.cached_tokens or 0) >= 11, "its tail was given up"


@pytest.mark.parametrize("interval", [0, 16, 64, 512])
@pytest.mark.parametrize("rows", [1, 2, 6])
def test_prompts_fill_a_model_with_states_whatever_the_interval(interval, rows):
    """Each keeps a state every so many tokens, so that memory is full of them after a few."""
    states = CacheGroup("state", lookback=1, is_state=True)
    count = rows * states.pages_of_a_row(16, 512, interval)
    group = CacheGroup("state", lookback=1, is_state=True, page_count=count)
    config = EngineConfig(
        page_size=16, num_pages=1000, max_running_requests=rows, chunked_prefill_size=512, checkpoint_interval=interval
    )
    h = Harness(config, token_limit=2200, model=SimulatedModel(groups=(FULL, group)))
    rng = np.random.default_rng(0)
    for _ in range(8):
        h.submit(rng.integers(0, 900, 2000).tolist(), greedy(4))
    ended = h.run()
    assert [request.finish.kind for request in ended] == ["length"] * 8


@pytest.mark.parametrize("seed", range(40))
def test_what_a_new_row_needs_is_what_it_lacks_once_it_is_leased(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 4, 16]))
    groups = [FULL, CacheGroup("state", 1, True, 200), CacheGroup("window", int(rng.integers(1, 40)), False, 400)]
    config = EngineConfig(
        page_size=size, num_pages=300, checkpoint_interval=int(rng.choice([0, size, 3 * size])), chunked_prefill_size=32
    )
    h = Harness(config, token_limit=128, model=SimulatedModel(groups=tuple(groups[: int(rng.integers(1, 4))])))
    leases: LeaseTable = h.memory.leases
    lease = leases.open(h.memory.match("", np.zeros(1, np.int32)))
    covered = size * int(rng.integers(0, 4))
    lease.extend(covered)
    target = int(rng.integers(0, 100))
    checkpoints = tuple(size * rng.integers(0, 100 // size + 1, 2))
    lease.keep_checkpoints(*checkpoints)
    shortage = leases.lacking(np.array([lease.row]), np.array([target]), np.zeros(1, np.bool_))
    assert leases.needs_of_a_row(covered, target, checkpoints) == list(shortage.pages)


@pytest.mark.parametrize("is_alone", [True, False])
def test_pins_of_operators_give_way_to_a_request_that_is_alone_and_to_no_other(is_alone):
    config = EngineConfig(page_size=4, num_pages=20, max_running_requests=2, cache_pinned_share=1.0)
    h = Harness(config, token_limit=200)
    prompt = list(range(60))
    h.submit(prompt, greedy(1))
    h.run()
    assert h.memory.pin("kept", "", np.array(prompt, np.int32), None).tokens == 60
    beside = None if is_alone else h.submit([7] * 5, greedy(6))
    h.step()
    large = h.submit([900] * 40, greedy(2))
    while h.scheduler.has_work:
        running = beside is not None and beside.finish is None
        h.step()
        assert large.state is RequestState.WAITING or not running
        assert len(h.memory.pins) == 1 or not running
    assert large.finish.kind == "length"
    assert not len(h.memory.pins)
    assert h.memory.pins.given_up_count == 1


def more_pages(h: Harness, length: int, longest: int, share: float, have: int) -> list[int]:
    """Of each group, for a row with pages in `have` columns."""
    size, needs = h.memory.page_size, h.memory.shape.row_needs
    columns = max(-(-(length + int(share * (longest - length))) // size) - have, 0)
    return [
        min(columns, max(most - have, 0)) if group.is_bounded else columns
        for group, most in zip(h.memory.groups, needs, strict=True)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_what_requests_will_need_is_the_sum_over_them(seed):
    rng = np.random.default_rng(seed)
    groups = (FULL, CacheGroup("window", 9, False, 400), CacheGroup("state", 1, True, 200))
    config = EngineConfig(page_size=4, num_pages=400, max_running_requests=6, chunked_prefill_size=16)
    h = Harness(config, token_limit=200, model=SimulatedModel(groups=groups[: 1 + seed % 3]))
    admission, leases, running = h.scheduler._planner.admission, h.memory.leases, h.scheduler.running
    for number in range(10):
        request = Request(f"r{number}", rng.integers(0, 3, int(rng.integers(1, 60))).astype(np.int32), greedy(90))
        request.setbacks = int(rng.integers(0, 4))
        h.scheduler.add(request)
    for _ in range(12):
        h.step()
        share = admission.growth.share = float(rng.choice([0.05, 0.3, 0.77]))
        each = [
            more_pages(
                h, int(running.length[row]), int(running.max_length[row]),
                share if running.request(row).is_trusted else 1.0, int(leases.allocated[row]) // 4,
            )
            for row in running.order.tolist()
        ]  # fmt: skip
        assert admission.reserved_page_counts().tolist() == np.sum(each, axis=0).tolist()
        for request in (one for one in h.scheduler.requests.values() if one.is_queued):
            match, longest = admission.match(request), len(request.prompt) + 90
            share_of_it = share if request.is_trusted else 1.0
            length = len(request.tokens)
            columns = -(-(length + 1 + int(share_of_it * (longest - length))) // 4) - match.length // 4
            expected = [
                min(columns, most) if group.is_bounded else columns
                for group, most in zip(h.memory.groups, h.memory.shape.row_needs, strict=True)
            ]
            assert admission.page_counts_of(request, match).tolist() == expected
    h.scheduler.abort_all()
    h.run()
