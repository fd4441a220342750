"""Row-wise operations: norm, activation, rotation."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from freehold.engine.cpu.simd import (
    add,
    exp,
    fma,
    load,
    max_lanes,
    maximum,
    mul,
    put,
    put_apart,
    reciprocal,
    splat,
    store,
    sub,
    sum_lanes,
)

LANES = 16
ROWS_PARALLEL = 4  # with fewer rows, one thread is done before a second one starts
BYTE_MAX = np.float32(127)


@njit(inline="always")
def normalize(x, at, size, weight, epsilon, out, out_at):
    """Apply one RMSNorm over `size` (a multiple of 16) floats."""
    squares = splat(np.float32(0))
    for k in range(0, size, LANES):
        value = load(x, at + k)
        squares = fma(value, value, squares)
    mean = sum_lanes(squares) / np.float32(size)
    scale = splat(np.float32(1) / np.sqrt(mean + epsilon))
    for k in range(0, size, LANES):
        store(out, out_at + k, mul(load(weight, k), mul(load(x, at + k), scale)))


@njit(inline="always")
def _swiglu(gate_up, at, size, out, out_at):
    one, zero = splat(np.float32(1)), splat(np.float32(0))
    for k in range(0, size, LANES):
        gate, up = load(gate_up, at + k), load(gate_up, at + size + k)
        store(out, out_at + k, mul(mul(gate, reciprocal(add(one, exp(sub(zero, gate))))), up))


@njit(inline="always")
def _geglu(gate_up, at, size, out, out_at):
    """Compute gelu(gate) * up, in its tanh form: gate * sigmoid(sqrt(8 / pi) * (gate + 0.044715 * gate**3))."""
    one, cubic, slope = splat(np.float32(1)), splat(np.float32(0.044715)), splat(np.float32(-1.5957691216057308))
    for k in range(0, size, LANES):
        gate, up = load(gate_up, at + k), load(gate_up, at + size + k)
        inner = fma(mul(cubic, mul(gate, gate)), gate, gate)
        store(out, out_at + k, mul(mul(gate, reciprocal(add(one, exp(mul(slope, inner))))), up))


@njit(inline="always")
def _minimum(a, b):
    zero = splat(np.float32(0))
    return sub(zero, maximum(sub(zero, a), sub(zero, b)))


@njit(inline="always")
def _clamped_swiglu(gate_up, at, size, alpha, limit, out, out_at):
    """Compute gpt-oss's clamped gate * sigmoid(alpha * gate) * (clamped up + 1)."""
    one = splat(np.float32(1))
    slope, low, high = splat(-alpha), splat(-limit), splat(limit)
    for k in range(0, size, LANES):
        gate, up = _minimum(load(gate_up, at + k), high), load(gate_up, at + size + k)
        up = maximum(_minimum(up, high), low)
        gated = mul(gate, reciprocal(add(one, exp(mul(slope, gate)))))
        store(out, out_at + k, mul(gated, add(up, one)))


PLAIN, NORM, SWIGLU, GEGLU, CLAMPED = range(5)
NO_NORM = np.zeros(0, np.float32)


class Preparation(NamedTuple):
    """What is applied to a row before its product: nothing (PLAIN), RMSNorm with weights `parameters` (NORM), or a
    gated activation of gate and up (SWIGLU, GEGLU, CLAMPED with alpha and limit as `parameters`), which makes n numbers
    of 2 n."""

    step: int = PLAIN
    parameters: Any = NO_NORM
    epsilon: Any = 0.0


PLAINLY = Preparation()


@njit(inline="always")
def prepare_row(preparation, x, row, columns, out, out_at):
    """Prepare row `row` of x, flat -> `columns` floats."""
    if preparation.step == NORM:
        normalize(x, row * columns, columns, preparation.parameters, preparation.epsilon, out, out_at)
    elif preparation.step == SWIGLU:
        _swiglu(x, row * 2 * columns, columns, out, out_at)
    elif preparation.step == GEGLU:
        _geglu(x, row * 2 * columns, columns, out, out_at)
    elif preparation.step == CLAMPED:
        alpha, limit = preparation.parameters[0], preparation.parameters[1]
        _clamped_swiglu(x, row * 2 * columns, columns, alpha, limit, out, out_at)
    else:
        for k in range(0, columns, LANES):
            store(out, out_at + k, load(x, row * columns + k))


class Heads(NamedTuple):
    """The numbers of query and KV heads, and the sizes of keys and values. If `is_latent`, the value is the first
    numbers of the key, and is not stored."""

    queries: int
    kv: int
    size: int
    value_size: int
    is_latent: bool


class LayerKV(NamedTuple):
    """One layer's keys of each 16 slots [kv heads, size, 16], so that 16 neighbouring keys fill the lanes, and values
    [kv heads, 16, value size], flat and `tile_step` apart; their scales [kv heads, 16], `scale_step` apart, empty if
    the format has none."""

    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any
    tile_step: Any
    scale_step: Any


class Rotation(NamedTuple):
    """cos and sin flat [positions, pairs]; a head's rotated numbers begin at `start`; head norms before rotation
    [size], empty for none."""

    cos: Any
    sin: Any
    pairs: int
    start: int
    q_norm: Any
    k_norm: Any
    epsilon: Any


@njit(inline="always")
def _rotate(x, at, size, rotation, position, out, out_at):
    """Apply rotary embedding, halves layout: pairs (k, k + pairs). Other numbers are copied. `size` is at least 16; if
    it is no multiple, the last numbers are copied twice."""
    pairs, start, angle = rotation.pairs, rotation.start, position * rotation.pairs
    for stretch in range(0, size if 2 * pairs < size else 0, LANES):
        k = min(stretch, size - LANES)
        store(out, out_at + k, load(x, at + k))
    whole = pairs - pairs % LANES
    for k in range(0, whole, LANES):
        c, s = load(rotation.cos, angle + k), load(rotation.sin, angle + k)
        low, high = load(x, at + start + k), load(x, at + start + pairs + k)
        store(out, out_at + start + k, sub(mul(low, c), mul(high, s)))
        store(out, out_at + start + pairs + k, add(mul(high, c), mul(low, s)))
    for k in range(whole, pairs):
        c, s = rotation.cos[angle + k], rotation.sin[angle + k]
        low, high = x[at + start + k], x[at + start + pairs + k]
        out[out_at + start + k] = low * c - high * s
        out[out_at + start + pairs + k] = high * c + low * s


@njit(inline="always")
def _norm_and_rotate(x, at, size, norm, rotation, position, out, out_at):
    if len(norm):
        normed = np.empty(size, np.float32)
        normalize(x, at, size, norm, rotation.epsilon, normed, 0)
        _rotate(normed, 0, size, rotation, position, out, out_at)
    else:
        _rotate(x, at, size, rotation, position, out, out_at)


@njit(inline="always")
def largest_size(x, at, size):
    """Return the largest absolute value of `size` floats, at least 16."""
    zero, top = splat(np.float32(0)), splat(np.float32(0))
    for stretch in range(0, size, LANES):
        value = load(x, at + min(stretch, size - LANES))
        top = maximum(top, maximum(value, sub(zero, value)))
    return max_lanes(top)


@njit(inline="always")
def _scale_of(x, at, size, scales, to):
    """Return the factor that fits `size` floats to the KV's format; store its inverse in scales[to]."""
    if not len(scales):
        return np.float32(1)
    largest = largest_size(x, at, size)
    scales[to] = largest / BYTE_MAX
    return BYTE_MAX / largest if largest > 0 else np.float32(0)


@njit(inline="always")
def rotate_and_write(token, qkv, position, slot, rotation, heads, kv, key, q_out):
    """Rotate a token's queries into q_out [n, heads, size]; rotate its keys, in `key` [size], and write keys and values
    to its slot."""
    size, value_size = heads.size, heads.value_size
    width = (heads.queries + heads.kv) * size + (0 if heads.is_latent else heads.kv * value_size)
    for head in range(heads.queries):
        to = (token * heads.queries + head) * size
        _norm_and_rotate(qkv, token * width + head * size, size, rotation.q_norm, rotation, position, q_out, to)
    tile, lane = slot // LANES, slot % LANES
    for head in range(heads.kv):
        at = token * width + (heads.queries + head) * size
        _norm_and_rotate(qkv, at, size, rotation.k_norm, rotation, position, key, 0)
        to, scale_at = tile * kv.tile_step, tile * kv.scale_step + head * LANES + lane
        factor = splat(_scale_of(key, 0, size, kv.key_scales, scale_at))
        for stretch in range(0, size, LANES):
            k = min(stretch, size - LANES)
            put_apart(kv.keys, to + (head * size + k) * LANES + lane, mul(load(key, k), factor))
        if heads.is_latent:
            continue
        at = token * width + (heads.queries + heads.kv) * size + head * value_size
        factor = splat(_scale_of(qkv, at, value_size, kv.value_scales, scale_at))
        for k in range(0, value_size, LANES):
            put(kv.values, to + (head * LANES + lane) * value_size + k, mul(load(qkv, at + k), factor))
