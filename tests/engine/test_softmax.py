"""Exponentials, and a softmax that is computed block by block."""

import numpy as np
import pytest
from numba import njit

from freehold.engine.cpu.simd import exp, exp_bf16, load, store
from freehold.engine.cpu.softmax import KEYS, LANES, SLACK, Softmax, highest_visible, take_block


@njit
def exponentials(a, exact, short):
    for i in range(0, len(a), LANES):
        store(exact, i, exp(load(a, i)))
        store(short, i, exp_bf16(load(a, i)))


def test_exponentials():
    """One is as good as float32, the other as bfloat16, and what is masked weighs nothing."""
    a = np.linspace(-87, 20, 1 << 16).astype(np.float32)
    exact, short = np.empty_like(a), np.empty_like(a)
    exponentials(a, exact, short)
    expected = np.exp(a.astype(np.float64))
    np.testing.assert_allclose(exact, expected, rtol=3e-7)
    np.testing.assert_allclose(short, expected, rtol=2.0**-8 + 2.0**-18)
    assert not (short.view(np.uint32) & 0xFFFF).any()
    masked = np.full(LANES, -np.inf, np.float32)
    exponentials(masked, exact, short)
    assert not exact[:LANES].any()
    assert not short[:LANES].any()


@njit
def weighted_sum(scores, values, softmax):
    """Of one row and values of `LANES` numbers."""
    for block in range(0, len(values), KEYS):
        weights = scores[block : block + KEYS].copy()
        top = highest_visible(weights, 0, 0, KEYS)
        lanes = np.empty(LANES, np.float32)
        store(lanes, 0, take_block(softmax, 0, weights, 0, top, LANES, False, np.empty(0, np.uint16)))
        softmax.weights[0] += lanes.sum()
        for key in range(KEYS):
            softmax.sums[:] += weights[key] * values[block + key]
    return softmax.sums / softmax.weights[0]


@pytest.mark.parametrize("growth", [0, 0.9 * SLACK, 1.1 * SLACK, 200, -200])
def test_rows_are_rescaled_when_scores_grow(growth):
    """From block to block: not at all, by less and by more than the slack, and so far that what came first is nothing
    beside what comes last."""
    rng, blocks = np.random.default_rng(0), 6
    steps = np.repeat(np.arange(blocks), KEYS) * growth
    scores = (rng.standard_normal(blocks * KEYS) + steps).astype(np.float32)
    values = rng.standard_normal((blocks * KEYS, LANES)).astype(np.float32)
    empty = np.zeros(LANES, np.float32), np.full(1, -np.inf, np.float32), np.zeros(1, np.float32)
    exact = np.exp(scores.astype(np.float64) - scores.max())
    softmax = Softmax(*empty)
    np.testing.assert_allclose(
        weighted_sum(scores, values, softmax), exact @ values / exact.sum(), rtol=1e-5, atol=1e-6
    )
    assert scores.max() - SLACK <= softmax.levels[0] <= scores.max()
