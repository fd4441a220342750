"""Which prompts are computed first: short ones need not wait for long ones, and long ones get on."""

import pytest

from freehold.config import EngineConfig
from freehold.contract.sampling_params import SamplingParams
from freehold.scheduler.chunk_budget import CHUNK_MIN, CHUNK_SLOW, STEP_S, TOGETHER_S
from harness import Harness

TOKEN_S = 0.001
TOGETHER = int(TOGETHER_S / TOKEN_S)


def timed(token: float = TOKEN_S, **options) -> tuple[Harness, list[dict[str, int]]]:
    """An engine whose prompt tokens take `token` seconds, and prompt tokens by request of each of its steps."""
    config = EngineConfig(**{"num_pages": 2000, "page_size": 4, "max_running_requests": 16, **options})
    h = Harness(config, token_limit=4000)
    h.scheduler.results._chunks.time.learn(0, 100, 100 * token)
    seen: list[dict[str, int]] = []

    def observe(step):
        rows = zip(step.rows.tolist(), step.counts.tolist(), step.decodes.tolist(), strict=True)
        seen.append({h.scheduler.running.request(row).id: count for row, count, decodes in rows if not decodes})

    h.engine.observe = observe
    return h, seen


def prompt(h: Harness, name: str, length: int, priority: int = 0):
    first = 100 + 7 * len(h.ended) + sum(map(ord, name)) * 11 % 700
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    return h.submit([first + i % 50 for i in range(length)], params, name, priority=priority)


def test_several_short_prompts_are_ready_one_after_the_other():
    h, seen = timed()
    requests = [prompt(h, f"{chr(65 + i)}", 45) for i in range(8)]
    h.run()
    chunks = [step for step in seen if step]
    assert [len(step) for step in chunks] == [3, 3, 2]
    assert all(count == 45 for step in chunks for count in step.values()), "none is cut"
    assert all(len(request.output) == 4 for request in requests)


def test_a_prompt_alone_has_the_whole_step():
    h, seen = timed()
    prompt(h, "long", 600)
    h.run()
    assert seen[0] == {"long": STEP_S / TOKEN_S}


def test_a_short_prompt_does_not_wait_for_a_long_one():
    h, seen = timed()
    prompt(h, "long", 2000)
    for _ in range(2):
        h.step()
    before = len(seen)
    short = prompt(h, "short", 40)
    while short.first_token is None:
        h.step()
    with_short = [step for step in seen if "short" in step]
    assert with_short == [{"long": TOGETHER // 2, "short": 40}]
    assert seen.index(with_short[0]) <= before + 1, "what was planned already is not planned anew"
    h.run()


def test_of_running_prompts_the_shortest_goes_first():
    """The one that came first has half of the step, the shortest of all what it needs of the rest."""
    h, seen = timed()
    prompt(h, "long", 3000)
    h.step()
    prompt(h, "middle", 900)
    prompt(h, "short", 300)
    h.run()
    beside = [step for step in seen if "short" in step and "long" in step and "middle" in step]
    assert not beside, "the middle one waits for the short one"
    assert {step["long"] for step in seen if "short" in step} <= {TOGETHER // 2}
    assert {step["long"] for step in seen if "middle" in step} <= {TOGETHER // 2, 100}


def test_a_long_prompt_gets_on_whoever_comes():
    """Short prompts come without end; half of each step is for the long one."""
    h, seen = timed()
    long = prompt(h, "long", 1000)
    for i in range(60):
        for name in "abc":
            prompt(h, f"{name}{i}", 45)
        h.step()
        if long.first_token is not None:
            break
    assert i <= 1000 / (TOGETHER / 2) + 4
    assert all(step["long"] >= TOGETHER // 2 for step in seen[1:] if "long" in step and step["long"] > 2)
    h.run()


def test_who_waits_for_what_a_prompt_computes_does_not_slow_it_down():
    h, seen = timed()
    shared = [300 + i % 50 for i in range(1000)]
    for i in range(4):
        h.submit([*shared, i], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), f"same {i}")
    h.run()
    assert sum(max(step.values()) == STEP_S / TOKEN_S for step in seen if step) >= 2


def test_who_is_more_important_goes_first():
    h, seen = timed(schedule_policy="priority")
    prompt(h, "long", 1000)
    h.step()
    prompt(h, "important", 300, priority=5)
    h.run()
    steps = [step for step in seen if "important" in step]
    assert all(step.get("long", 0) <= TOGETHER // 2 for step in steps)
    assert max(step["important"] for step in steps) >= TOGETHER // 2


@pytest.mark.parametrize(("token", "alone", "together"), [
    (0.00001, 512, 512),  # a quick machine
    (0.001, 250, 100),
    (0.1, CHUNK_SLOW, 2 * CHUNK_MIN),  # a slow one still computes several at a time
])  # fmt: skip
def test_steps_are_as_long_as_others_can_wait(token, alone, together):
    h, _ = timed(token)
    chunks = h.scheduler.results._chunks
    assert (chunks.tokens(0), chunks.together()) == (alone, together)
