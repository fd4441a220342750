"""Row-wise operations: norm, activation, rotation."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from freehold.engine.cpu.simd import add, exp, fma, load, mul, put, reciprocal, splat, store, sub, sum_lanes

LANES = 16
ROWS_PARALLEL = 4  # with fewer rows, one thread is done before a second one has started
BYTE_MAX = np.float32(127)


@njit(inline="always")
def _normalize(x, at, size, weight, epsilon, out, out_at):
    """One RMSNorm over `size` (a multiple of 16) floats."""
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


PLAIN, NORM, SWIGLU = range(3)
NO_NORM = np.zeros(0, np.float32)


class Preparation(NamedTuple):
    """What happens to a row before it is multiplied: nothing (PLAIN), RMSNorm with weights `norm` (NORM), or
    silu(gate) * up (SWIGLU), for which a row of n numbers comes from 2 n."""

    step: int
    norm: Any
    epsilon: Any


@njit(inline="always")
def prepare_row(preparation, x, row, columns, out, out_at):
    """Row `row` of x, flat -> `columns` floats."""
    if preparation.step == NORM:
        _normalize(x, row * columns, columns, preparation.norm, preparation.epsilon, out, out_at)
    elif preparation.step == SWIGLU:
        _swiglu(x, row * 2 * columns, columns, out, out_at)
    else:
        for k in range(0, columns, LANES):
            store(out, out_at + k, load(x, row * columns + k))


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def prepare(step, x, norm, epsilon, columns, out):
    """All rows: out flat [n, columns]"""
    for row in prange(len(out) // columns):
        prepare_row(Preparation(step, norm, epsilon), x, row, columns, out, row * columns)


class Heads(NamedTuple):
    """How many heads of queries and of keys and values there are, and how many numbers a head has."""

    queries: int
    kv: int
    size: int


class LayerKV(NamedTuple):
    """One layer's keys [slots / 16, kv heads, size, 16], so that 16 neighbouring keys fill the lanes, and values
    [slots / 16, kv heads, 16, size], flat; their scales [slots / 16, kv heads, 16], empty unless the format has any."""

    keys: Any
    values: Any
    key_scales: Any
    value_scales: Any


class Rotation(NamedTuple):
    """cos and sin flat [positions, size / 2]; norms of heads before it [size], empty for none."""

    cos: Any
    sin: Any
    q_norm: Any
    k_norm: Any
    epsilon: Any


@njit(inline="always")
def _rotate(x, at, size, rotation, angle, out, out_at):
    """Rotary embedding, halves layout: pairs (k, k + size / 2)."""
    half = size // 2
    for k in range(half):
        c, s = rotation.cos[angle + k], rotation.sin[angle + k]
        low, high = x[at + k], x[at + half + k]
        out[out_at + k] = low * c - high * s
        out[out_at + half + k] = high * c + low * s


@njit(inline="always")
def _norm_and_rotate(x, at, size, norm, rotation, angle, out, out_at):
    if len(norm):
        normed = np.empty(size, np.float32)
        _normalize(x, at, size, norm, rotation.epsilon, normed, 0)
        _rotate(normed, 0, size, rotation, angle, out, out_at)
    else:
        _rotate(x, at, size, rotation, angle, out, out_at)


@njit(inline="always")
def _scale_of(x, at, size, scales, to):
    """What to multiply `size` floats by so that they fit the KV's format; its inverse goes to scales[to]."""
    if not len(scales):
        return np.float32(1)
    largest = np.float32(0)
    for k in range(size):
        largest = max(largest, abs(x[at + k]))
    scales[to] = largest / BYTE_MAX
    return BYTE_MAX / largest if largest > 0 else np.float32(0)


# Not inlined: Numba takes assignments to arrays in records for dead code where it looks into parallel loops.
@njit(nogil=True, error_model="numpy")
def rotate_and_write(token, qkv, position, slot, rotation, heads, kv, q_out):
    """Rotate a token's queries into q_out [n, heads, size]; rotate its keys and put keys and values into its slot."""
    size, width = heads.size, (heads.queries + 2 * heads.kv) * heads.size
    key, angle = np.empty(size, np.float32), position * (size // 2)
    for head in range(heads.queries):
        to = (token * heads.queries + head) * size
        _norm_and_rotate(qkv, token * width + head * size, size, rotation.q_norm, rotation, angle, q_out, to)
    tile, lane = slot // LANES, slot % LANES
    for head in range(heads.kv):
        at = token * width + (heads.queries + head) * size
        _norm_and_rotate(qkv, at, size, rotation.k_norm, rotation, angle, key, 0)
        base, scale_at = (tile * heads.kv + head) * size * LANES, (tile * heads.kv + head) * LANES + lane
        factor = _scale_of(key, 0, size, kv.key_scales, scale_at)
        for k in range(size):
            put(kv.keys, base + k * LANES + lane, key[k] * factor)
        at += heads.kv * size
        factor = _scale_of(qkv, at, size, kv.value_scales, scale_at)
        for k in range(size):
            put(kv.values, base + lane * size + k, qkv[at + k] * factor)
