"""Kernels that keep states, against loops written on paper, and where states go."""

import numpy as np
import pytest

from freehold.engine.cpu.caches import GroupCache
from freehold.engine.cpu.recurrence import Convolution, Delta, Scan, Visits, convolve, delta_rule, scan
from freehold.engine.cpu.state_batch import StateBatch
from freehold.models.spec import CacheLayout, StateCache

NONE = np.zeros(0, np.float32)


def visit(count: int, read: int, write: int) -> Visits:
    """One sequence, whose state comes from slot `read`, and goes to slot `write` after all tokens."""
    return Visits(*(np.array(one) for one in ([0], [count], [read], [0, 1], [count], [write])))


def whole(count: int) -> Visits:
    """From its beginning."""
    return visit(count, -1, 1)


def test_a_convolution():
    rng = np.random.default_rng(0)
    x, taps = rng.standard_normal((20, 200)).astype(np.float32), rng.standard_normal((4, 200)).astype(np.float32)
    bias = rng.standard_normal(200).astype(np.float32)
    out, states = np.empty_like(x), np.zeros((2, 600), np.float32)
    convolve(x, Convolution(taps.ravel(), bias, True), states, whole(20), out)
    padded = np.concatenate([np.zeros((3, 200)), x])
    expected = bias + sum(taps[k] * padded[k : k + 20] for k in range(4))
    np.testing.assert_allclose(out, expected / (1 + np.exp(-expected)), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(states[1].reshape(3, 200), x[-3:])


def test_a_scan():
    """Mamba2, token by token, in float64."""
    rng = np.random.default_rng(1)
    heads, size, state_size, groups, count = 4, 16, 8, 2, 12
    x = rng.standard_normal((count, heads * size + 2 * groups * state_size)).astype(np.float32)
    steps, bias = rng.standard_normal((count, heads)).astype(np.float32), rng.standard_normal(heads).astype(np.float32)
    decay, skip = -rng.random(heads).astype(np.float32), rng.standard_normal(heads).astype(np.float32)
    out, states = np.empty((count, heads * size), np.float32), np.zeros((2, heads * size * state_size), np.float32)
    limits = np.float32(0.1), np.float32(1.5)
    mamba = Scan(heads, size, state_size, groups, decay, bias, skip, *limits, 0)
    scan(x, steps, mamba, states, whole(count), out)
    state = np.zeros((heads, state_size, size))
    for t in range(count):
        step = np.clip(np.log1p(np.exp(steps[t].astype(np.float64) + bias)), 0.1, 1.5)
        inputs = x[t, : heads * size].reshape(heads, size)
        b, c = x[t, heads * size :].reshape(2, groups, state_size).repeat(heads // groups, axis=1)
        state = state * np.exp(step * decay)[:, None, None] + (step[:, None] * b)[:, :, None] * inputs[:, None, :]
        expected = np.einsum("hs,hsp->hp", c, state) + skip[:, None] * inputs
        np.testing.assert_allclose(out[t].reshape(heads, size), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(states[1].reshape(state.shape), state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_tiled", [False, True])
def test_the_delta_rule(is_tiled):
    rng = np.random.default_rng(2)
    key_heads, heads, keys, values, count = 2, 4, 16, 32, 12
    x = rng.standard_normal((count, 2 * key_heads * keys + heads * values)).astype(np.float32)
    gates, bias = rng.standard_normal((count, 2 * heads)).astype(np.float32), rng.standard_normal(heads)
    decay = -rng.random(heads).astype(np.float32)
    out, states = np.empty((count, heads * values), np.float32), np.zeros((2, heads * keys * values), np.float32)
    rule = Delta(key_heads, heads, is_tiled, keys, values, decay, bias.astype(np.float32), 0)
    delta_rule(x, gates, rule, states, whole(count), out)
    state = np.zeros((heads, keys, values))
    for t in range(count):
        both, times = x[t, : 2 * key_heads * keys].reshape(2, key_heads, keys), heads // key_heads
        query, key = np.tile(both, (1, times, 1)) if is_tiled else both.repeat(times, axis=1)
        query, key = (one / np.sqrt((one**2).sum(-1, keepdims=True) + 1e-6) for one in (query, key))
        strength, step = 1 / (1 + np.exp(-gates[t, :heads])), np.log1p(np.exp(gates[t, heads:] + bias))
        state = state * np.exp(step * decay)[:, None, None]
        known = np.einsum("hk,hkv->hv", key, state)
        change = (x[t, 2 * key_heads * keys :].reshape(heads, values) - known) * strength[:, None]
        state = state + key[:, :, None] * change[:, None, :]
        expected = np.einsum("hk,hkv->hv", query / np.sqrt(keys), state)
        np.testing.assert_allclose(out[t].reshape(heads, values), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(states[1].reshape(state.shape), state, rtol=1e-4, atol=1e-5)


def parts(count: int, first: int) -> list[tuple[slice, Visits]]:
    """The same sequence in two steps: the second goes on from slot 1."""
    return [(slice(first), visit(first, -1, 1)), (slice(first, count), visit(count - first, 1, 2))]


@pytest.mark.parametrize("first", [1, 2, 7])
def test_a_state_goes_on_as_if_it_had_never_been_put_away(first):
    """Bit for bit, for each kernel."""
    rng, count, heads = np.random.default_rng(3), 12, 4
    taps, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((4 * 96,), (96,)))
    steps = rng.standard_normal((count, 2 * heads)).astype(np.float32)
    own = rng.standard_normal(heads).astype(np.float32)
    x = rng.standard_normal((count, 96)).astype(np.float32)
    convolution = Convolution(taps, bias, True)
    mamba = Scan(heads, 16, 8, 2, -abs(own), own, own, np.float32(0), np.float32(9), 0)
    rule = Delta(1, heads, False, 16, 16, -abs(own), own, 0)
    kernels = {  # numbers of a state, columns of the output, the kernel on some rows
        "convolve": (288, 96, lambda at, *to: convolve(x[at], convolution, *to)),
        "scan": (512, 64, lambda at, *to: scan(x[at], steps[at, :heads].copy(), mamba, *to)),
        "delta": (1024, 64, lambda at, *to: delta_rule(x[at], steps[at], rule, *to)),
    }
    for name, (size, columns, kernel) in kernels.items():
        states, apart, expected, found = (np.zeros(shape, np.float32) for shape in (
            (3, size), (3, size), (count, columns), (count, columns)))  # fmt: skip
        kernel(slice(count), states, whole(count), expected)
        for at, visits in parts(count, first):
            kernel(at, apart, visits, found[at])
        np.testing.assert_array_equal(found, expected, name)
        np.testing.assert_array_equal(apart[2], states[1], name)


SIZE = 4


def cache() -> GroupCache:
    layout = CacheLayout(1, True, True, ((0, 0),), (StateCache(2),))
    return GroupCache(layout, 20, SIZE, "float32", scratch=8)


def writes(batch: StateBatch, sequence: int) -> list[tuple[int, int]]:
    visits = batch.visits
    part = slice(int(visits.writes[sequence]), int(visits.writes[sequence + 1]))
    return list(zip(visits.afters[part].tolist(), visits.slots[part].tolist(), strict=True))


def test_where_states_come_from_and_go():
    """A chunk leaves a state in every column that has a page; one that begins at 0 goes on from nothing."""
    table = np.array([[5, 0, 7, 8], [11, 12, 13, 14]], np.int32)
    rows, starts, counts = np.array([0, 1]), np.array([0, 6]), np.array([10, 1])
    batch = StateBatch.of(table, cache(), rows, starts, counts, np.zeros(2, np.int64))
    assert batch.visits.reads.tolist() == [-1, 12]
    assert writes(batch, 0) == [(4, 5), (10, 7)]
    assert writes(batch, 1) == [(1, 12)]
    on_the_edge = StateBatch.of(table, cache(), rows[1:], np.array([8]), np.array([1]), np.zeros(1, np.int64))
    assert on_the_edge.visits.reads.tolist() == [12]
    assert writes(on_the_edge, 0) == [(1, 13)]


@pytest.mark.parametrize(
    ("accepted", "filled"), [(0, {12: 7}), (1, {12: 8}), (2, {12: 8, 13: 9}), (3, {12: 8, 13: 10})]
)
def test_a_rejected_draft_is_in_no_state(accepted, filled):
    """Token 6 is given, three drafts follow it; column 1 ends after 8 tokens. A state says how many tokens are in
    it."""
    table, states = np.array([[11, 12, 13, 14]], np.int32), cache()
    one = np.array([1])
    batch = StateBatch.of(table, states, np.array([0]), np.array([6]), one + 3, one * 3)
    for after, slot in writes(batch, 0):
        states.states[0][slot] = 6 + after
    batch.settle(states, np.array([7 + accepted]))
    kept = {page: int(states.states[0][page, 0]) for page in range(1, 21) if states.states[0][page, 0]}
    assert kept == filled
