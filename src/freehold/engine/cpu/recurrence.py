"""Layers with a state: causal convolutions, the scan of Mamba2, the gated delta rule.

Tokens of a sequence are processed one by one in any chunk, so that the state after a token has the same bits however
the sequence was chunked. Lanes are independent columns, so no sum is ever reordered.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from freehold.engine.cpu.rows import sigmoid

CHANNELS = 128  # columns of a convolution that one task computes


class Visits(NamedTuple):
    """A step's use of states. Sequence i has `counts[i]` tokens, the first of them row `firsts[i]` of the inputs. It
    continues from slot `reads[i]`, or from zero if that is -1. After `afters[w]` of its tokens the state goes to
    `slots[w]`, for w from `writes[i]` up to `writes[i + 1]`, in ascending order of `afters`."""

    firsts: Any
    counts: Any
    reads: Any
    writes: Any
    afters: Any
    slots: Any


class Convolution(NamedTuple):
    """taps flat [taps, channels]; bias [channels] or empty; whether SiLU follows."""

    taps: Any
    bias: Any
    silu: bool


@njit(inline="always")
def _softplus(x):
    return x if x > np.float32(20) else np.float32(math.log1p(math.exp(x)))


@njit(nogil=True, error_model="numpy")
def _convolve_block(x, convolution, states, visits, sequence, low, high, out):
    """Convolve columns `low` up to `high` of one sequence."""
    taps, bias = convolution.taps, convolution.bias
    count, first, channels = visits.counts[sequence], visits.firsts[sequence], x.shape[1]
    before = len(taps) // channels - 1  # inputs that a state keeps
    width = high - low
    past = np.zeros((before, width), np.float32)
    if visits.reads[sequence] >= 0:
        for row in range(before):
            for c in range(width):
                past[row, c] = states[visits.reads[sequence], row * channels + low + c]
    for t in range(count):
        for c in range(width):
            out[first + t, low + c] = bias[low + c] if len(bias) else np.float32(0)
        for k in range(before + 1):
            at = t - before + k
            for c in range(width):
                value = x[first + at, low + c] if at >= 0 else past[at + before, c]
                out[first + t, low + c] += taps[k * channels + low + c] * value
        if convolution.silu:
            for c in range(width):
                value = out[first + t, low + c]
                out[first + t, low + c] = value * sigmoid(value)
    for write in range(visits.writes[sequence], visits.writes[sequence + 1]):
        for row in range(before):
            at = visits.afters[write] - before + row
            for c in range(width):
                value = x[first + at, low + c] if at >= 0 else past[at + before, c]
                states[visits.slots[write], row * channels + low + c] = value


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def convolve(x, convolution, states, visits, out):
    """Convolve x [tokens, channels] -> out likewise; states [slots, size], which begin with the last inputs [taps - 1,
    channels]."""
    channels = x.shape[1]
    blocks = (channels + CHANNELS - 1) // CHANNELS
    for work in prange(len(visits.firsts) * blocks):
        low = work % blocks * CHANNELS
        high = min(low + CHANNELS, channels)
        _convolve_block(x, convolution, states, visits, work // blocks, low, high, out)


@njit(inline="always")
def _take_state(states, slot, at, state):
    """Load a state [rows, columns] from position `at` of a slot; zeros if there is none."""
    rows, columns = state.shape
    for s in range(rows):
        for p in range(columns):
            state[s, p] = states[slot, at + s * columns + p] if slot >= 0 else np.float32(0)


@njit(inline="always")
def _keep_state(states, slot, at, state):
    rows, columns = state.shape
    for s in range(rows):
        for p in range(columns):
            states[slot, at + s * columns + p] = state[s, p]


class Scan(NamedTuple):
    """Mamba2 as in `freehold.models.spec.Mamba2`; `decay`, `step_bias`, `skip` [heads]; states begin at `start`."""

    heads: int
    head_size: int
    state_size: int
    groups: int
    decay: Any
    step_bias: Any
    skip: Any
    step_min: Any
    step_max: Any
    start: int


@njit(nogil=True, error_model="numpy")
def _scan_head(x, steps, scan, states, visits, sequence, head, out):
    """Scan one head of one sequence. Its state is [state_size, head_size], so that lanes are the head's numbers."""
    size, state_size, first = scan.head_size, scan.state_size, visits.firsts[sequence]
    inner, group = scan.heads * size, head // (scan.heads // scan.groups)
    at_b, at_c = inner + group * state_size, inner + (scan.groups + group) * state_size
    state, read = np.empty((state_size, size), np.float32), np.empty(size, np.float32)
    place = scan.start + head * state_size * size
    _take_state(states, visits.reads[sequence], place, state)
    write = visits.writes[sequence]
    for t in range(visits.counts[sequence]):
        row = first + t
        step = _softplus(steps[row, head] + scan.step_bias[head])
        step = min(max(step, scan.step_min), scan.step_max)
        kept = np.float32(math.exp(step * scan.decay[head]))
        for p in range(size):
            read[p] = np.float32(0)
        for s in range(state_size):
            b, c = step * x[row, at_b + s], x[row, at_c + s]
            for p in range(size):
                value = state[s, p] * kept + b * x[row, head * size + p]
                state[s, p] = value
                read[p] += c * value
        for p in range(size):
            out[row, head * size + p] = read[p] + scan.skip[head] * x[row, head * size + p]
        if write < visits.writes[sequence + 1] and visits.afters[write] == t + 1:
            _keep_state(states, visits.slots[write], place, state)
            write += 1


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def scan(x, steps, mamba, states, visits, out):
    """Scan x [tokens, inputs, B and C] with steps [tokens, heads] and `mamba`, a Scan -> out [tokens, heads *
    head_size]."""
    for work in prange(len(visits.firsts) * mamba.heads):
        _scan_head(x, steps, mamba, states, visits, work // mamba.heads, work % mamba.heads, out)


class Delta(NamedTuple):
    """The gated delta rule as in `freehold.models.spec.GatedDelta`; `decay`, `step_bias` [value heads]; states begin at
    `start`."""

    key_heads: int
    value_heads: int
    tiled_heads: bool
    key_size: int
    value_size: int
    decay: Any
    step_bias: Any
    start: int


@njit(inline="always")
def _unit(x, row, at, size, factor, out):
    """Normalize a vector to length `factor`."""
    squares = np.float32(0)
    for k in range(size):
        squares += x[row, at + k] * x[row, at + k]
    scale = factor / np.float32(math.sqrt(squares + np.float32(1e-6)))
    for k in range(size):
        out[k] = x[row, at + k] * scale


@njit(nogil=True, error_model="numpy")
def _delta_head(x, gates, delta, states, visits, sequence, head, out):
    """Compute one value head of one sequence: its state [key_size, value_size] decays, then learns what the key
    lacks."""
    keys, values, first = delta.key_size, delta.value_size, visits.firsts[sequence]
    key_head = head // (delta.value_heads // delta.key_heads)
    if delta.tiled_heads:
        key_head = head % delta.key_heads
    at_key, at_value = (delta.key_heads + key_head) * keys, 2 * delta.key_heads * keys + head * values
    state, change, read = (
        np.empty((keys, values), np.float32),
        np.empty(values, np.float32),
        np.empty(values, np.float32),
    )
    query, key = np.empty(keys, np.float32), np.empty(keys, np.float32)
    place = delta.start + head * keys * values
    _take_state(states, visits.reads[sequence], place, state)
    write = visits.writes[sequence]
    for t in range(visits.counts[sequence]):
        row = first + t
        strength = sigmoid(gates[row, head])
        step = _softplus(gates[row, delta.value_heads + head] + delta.step_bias[head])
        kept = np.float32(math.exp(step * delta.decay[head]))
        _unit(x, row, key_head * keys, keys, np.float32(1) / np.float32(math.sqrt(keys)), query)
        _unit(x, row, at_key, keys, np.float32(1), key)
        for p in range(values):
            change[p], read[p] = np.float32(0), np.float32(0)
        for s in range(keys):
            for p in range(values):
                state[s, p] *= kept
                change[p] += state[s, p] * key[s]
        for p in range(values):
            change[p] = (x[row, at_value + p] - change[p]) * strength
        for s in range(keys):
            for p in range(values):
                state[s, p] += key[s] * change[p]
                read[p] += state[s, p] * query[s]
        for p in range(values):
            out[row, head * values + p] = read[p]
        if write < visits.writes[sequence + 1] and visits.afters[write] == t + 1:
            _keep_state(states, visits.slots[write], place, state)
            write += 1


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def delta_rule(x, gates, delta, states, visits, out):
    """Apply the rule to x [tokens, queries, keys and values] with gates [tokens, strengths and time steps] and `delta`,
    a Delta -> out [tokens, value heads * value_size]."""
    heads = delta.value_heads
    for work in prange(len(visits.firsts) * heads):
        _delta_head(x, gates, delta, states, visits, work // heads, work % heads, out)
