"""Choosing tokens: what each filter leaves, distributions, penalties, seeds."""

import itertools

import numpy as np
import pytest

from freehold import SamplingParams
from freehold.contract.step import RowStart
from freehold.engine.cpu import drawing
from freehold.engine.cpu.drawing import draw, uniform
from freehold.engine.sampler import Sampler

VOCAB = 64


def logits(seed: int = 0, size: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 2).astype(np.float32)


def allowed(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """The filtered distribution, written plainly."""
    weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
    order = np.argsort(-weights, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    share = weights[order] / weights[order].sum()
    order = order[: int(np.searchsorted(np.cumsum(share), top_p - 1e-12)) + 1]
    order = order[weights[order] >= min_p]
    return {int(token): weights[token] / weights[order].sum() for token in order}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(-1, 1.0, 0.0), (5, 1.0, 0.0), (-1, 0.8, 0.0), (-1, 1.0, 0.1), (10, 0.9, 0.05)]
)
def test_draws_follow_the_filtered_distribution(temperature, top_k, top_p, min_p):
    row = logits(3)
    expected = allowed(row, temperature, top_k, top_p, min_p)
    count = 20_000
    seen = np.zeros(VOCAB)
    for position in range(count):
        chance = uniform(np.uint64(11), position)
        seen[draw(row, np.float32(temperature), top_k, top_p, np.float32(min_p), chance)] += 1
    assert set(np.flatnonzero(seen)) <= set(expected)
    for token, share in expected.items():
        deviation = 4.5 * np.sqrt(share * (1 - share) / count) + 4 / count
        assert abs(seen[token] / count - share) < deviation, token


def test_extreme_chances_and_flat_or_peaked_logits():
    for row in (np.zeros(VOCAB, np.float32), np.full(VOCAB, -1e4, np.float32), logits()):
        for chance in (0.0, 1.0 - 2**-53):
            for top_k, top_p, min_p in ((-1, 1.0, 0.0), (1, 1.0, 0.0), (VOCAB * 2, 1e-6, 0.0), (-1, 1.0, 1.0)):
                token = draw(row, np.float32(1), top_k, top_p, np.float32(min_p), chance)
                assert token in allowed(row, 1.0, top_k, top_p, min_p)
    peaked = np.full(VOCAB, -np.inf, np.float32)
    peaked[7] = 3.0
    assert draw(peaked, np.float32(1), -1, 1.0, np.float32(0), 0.999) == 7


NO_DRAFTS = (np.zeros((1, 0), np.int32), np.zeros(1, np.int64))


def start(row: int, params: SamplingParams, tokens=(1, 2, 3), prompt_length=3, stops=(9,), seed=5) -> RowStart:
    return RowStart(row, params, seed, np.array(tokens, np.int32), prompt_length, stops, 100)


def sample(params: SamplingParams, row: np.ndarray, position: int = 3, **options):
    sampler = Sampler(2, VOCAB, drawing)
    sampler.start(start(0, params, **options))
    tokens, _, logprobs = sampler.sample(np.array([0]), np.array([position]), row[None].copy(), *NO_DRAFTS)
    return int(tokens[0]), logprobs.get(0)


def test_a_seeded_draw_depends_on_seed_and_position_alone():
    params = SamplingParams(temperature=1.0)
    row = logits(1)
    one = [sample(params, row, position, seed=1)[0] for position in range(3, 40)]
    assert one == [sample(params, row, position, seed=1)[0] for position in range(3, 40)]
    assert one != [sample(params, row, position, seed=2)[0] for position in range(3, 40)]


def test_rows_of_a_step_choose_as_each_does_alone():
    """Whatever their neighbours ask for."""
    asked = [SamplingParams(temperature=0), SamplingParams(temperature=2.0), SamplingParams(temperature=0, logprobs=2)]
    drafts, proposed = np.zeros((2, 0), np.int32), np.zeros(2, np.int64)
    for pair in itertools.product(asked, repeat=2):
        sampler, rows = Sampler(2, VOCAB, drawing), np.stack([logits(1), logits(2)])
        for row, params in enumerate(pair):
            sampler.start(start(row, params))
        for position in range(3, 20):
            chosen, counts, _ = sampler.sample(
                np.arange(2), np.full(2, position), rows.copy(), drafts, proposed
            )  # fmt: skip
            assert counts.tolist() == [1, 1]
            assert chosen.tolist() == [sample(*one, position)[0] for one in zip(pair, rows, strict=True)]


def test_penalties_count_the_output_as_it_grows():
    sampler = Sampler(1, VOCAB, drawing)
    flat = np.zeros((1, VOCAB), np.float32)
    flat[0, 20], flat[0, 21] = 1.0, 0.9
    sampler.start(start(0, SamplingParams(temperature=0, frequency_penalty=0.2), tokens=(20, 2, 3)))
    chosen = [int(sampler.sample(np.array([0]), np.array([3 + i]), flat.copy(), *NO_DRAFTS)[0][0]) for i in range(4)]
    assert chosen == [20, 21, 20, 21], "the prompt does not count"


def test_repetition_penalty_covers_prompt_and_earlier_output():
    row = np.zeros(VOCAB, np.float32)
    row[[1, 30, 40]] = [1.0, 0.95, 0.9]
    params = SamplingParams(temperature=0, repetition_penalty=1.5)
    assert sample(params, row, tokens=(1, 30), prompt_length=1)[0] == 40
    assert sample(params, row, tokens=(5, 6), prompt_length=1)[0] == 1


def test_logit_bias_and_min_tokens():
    row = np.zeros(VOCAB, np.float32)
    row[9] = 5.0
    assert sample(SamplingParams(temperature=0, logit_bias={12: 50.0, 10_000: 1.0}), row)[0] == 12
    held = SamplingParams(temperature=0, min_tokens=2, max_tokens=5)
    assert sample(held, row, position=4)[0] != 9, "9 is a stop token, and it is too early"
    assert sample(held, row, position=5)[0] == 9


def test_logprobs_are_those_of_the_distribution_and_greedy_is_its_best():
    row = logits(8)
    token, found = sample(SamplingParams(temperature=0, logprobs=5), row)
    expected = row.astype(np.float64) - row.max() - np.log(np.exp(row.astype(np.float64) - row.max()).sum())
    assert token == int(row.argmax()) == found.top[0][0]
    assert found.logprob == found.top[0][1], "the very same float"
    np.testing.assert_allclose([value for _, value in found.top], np.sort(expected)[::-1][:5], atol=1e-6)
    _, hot = sample(SamplingParams(temperature=2.0, logprobs=1, top_k=1), row)
    halved = row.astype(np.float64) / 2
    np.testing.assert_allclose(hot.logprob, halved.max() - np.log(np.exp(halved).sum()), atol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("top_p", 0), ("top_k", -2), ("min_p", 1.5), ("max_tokens", 0), ("n", 0),
     ("presence_penalty", 3), ("repetition_penalty", 0), ("logprobs", 99), ("stop", ("",)), ("min_tokens", 17),
     ("logit_bias", {3: 200.0}), ("seed", 1 << 70)],
)  # fmt: skip
def test_values_outside_their_limits_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field}: "):
        SamplingParams(**{field: value})
