"""Prompts get no more of a step than decoding requests can spare."""

import numpy as np
import pytest

from freehold import LLM, SamplingParams
from freehold.config import EngineConfig
from freehold.scheduler.chunk_budget import CHUNK_FIRST, CHUNK_MIN, ChunkBudget
from freehold.scheduler.step_time import StepTime


def machine(decoding: int, prompt: int) -> float:
    return (0.010 if decoding else 0.0) + 0.001 * prompt


def settled(target: float) -> int:
    """The chunk beside decoding requests, after it has had time to learn."""
    budget = ChunkBudget(512, target, StepTime())
    assert budget.tokens(3) == CHUNK_FIRST, "nothing is known yet"
    for _ in range(50):
        budget.time.learn(3, 0, machine(3, 0))
        chunk = budget.tokens(3)
        budget.time.learn(3, chunk, machine(3, chunk))
    return budget.tokens(3)


def test_a_step_lasts_as_long_as_the_target_allows():
    assert settled(0.050) == pytest.approx(40, abs=1)
    assert settled(0.200) == pytest.approx(190, abs=2)
    assert settled(9.0) == 512


def test_prompts_get_on_even_if_no_step_is_quick_enough():
    assert settled(0.005) == CHUNK_MIN


def test_where_nobody_decodes_or_nobody_asked_the_limit_counts():
    assert ChunkBudget(512, 0.001, StepTime()).tokens(0) == 512
    assert ChunkBudget(512, None, StepTime()).tokens(9) == 512


def test_a_machine_that_becomes_slower_is_noticed():
    budget = ChunkBudget(512, 0.050, StepTime())
    for slowness in (1, 2):
        for _ in range(50):
            budget.time.learn(1, 0, slowness * 0.01)
            budget.time.learn(1, 40, slowness * machine(1, 40))
        assert slowness * machine(1, budget.tokens(1)) == pytest.approx(0.050, rel=0.1)


def test_a_target_changes_chunks_and_no_token(checkpoint):
    """A long prompt comes while others decode; with a target that nothing can meet it is cut small."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = ["The river", np.arange(400, 900).tolist()]
    runs = []
    for target in (None, 0.01):
        with LLM(checkpoint=checkpoint, num_pages=200, target_itl_ms=target, audit_interval=1) as llm:
            first, second = llm.requests(prompts, params)
            llm.scheduler.add(first)
            while first.first_token is None:
                llm.scheduler.step()
            llm.scheduler.add(second)
            epochs = llm.scheduler.memory.epochs
            before, steps = epochs.submitted, 0
            while llm.scheduler.has_work:
                llm.scheduler.step()
                if second.first_token is None:
                    steps = epochs.submitted - before
            runs.append(([*first.output], [*second.output], steps))
    assert runs[0][:2] == runs[1][:2]
    assert runs[0][2] < 8
    assert runs[1][2] > 15


def test_a_target_must_be_positive():
    with pytest.raises(ValueError, match="target_itl_ms"):
        EngineConfig(target_itl_ms=0)
