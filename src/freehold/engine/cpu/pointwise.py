"""Row-wise operations: norm, activation, rotation."""

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


PLAIN, NORM, SWIGLU = range(3)  # what happens to a row before it is multiplied
NO_NORM = np.zeros(0, np.float32)


@njit(inline="always")
def prepare_row(step, x, row, columns, norm, epsilon, out, out_at):
    """Row `row` of x, flat -> `columns` floats: unchanged (PLAIN), RMS-normalized with weights `norm` (NORM), or
    silu(gate) * up (SWIGLU), for which a row of x has 2 * columns floats."""
    if step == NORM:
        _normalize(x, row * columns, columns, norm, epsilon, out, out_at)
    elif step == SWIGLU:
        _swiglu(x, row * 2 * columns, columns, out, out_at)
    else:
        for k in range(0, columns, LANES):
            store(out, out_at + k, load(x, row * columns + k))


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def prepare(step, x, norm, epsilon, columns, out):
    """All rows: out flat [n, columns]"""
    for row in prange(len(out) // columns):
        prepare_row(step, x, row, columns, norm, epsilon, out, row * columns)


@njit(inline="always")
def _rotate(x, at, size, cos, sin, angle_at, out, out_at):
    """Rotary embedding, halves layout: pairs (k, k + size / 2)."""
    half = size // 2
    for k in range(half):
        c, s = cos[angle_at + k], sin[angle_at + k]
        low, high = x[at + k], x[at + half + k]
        out[out_at + k] = low * c - high * s
        out[out_at + half + k] = high * c + low * s


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


@njit(inline="always")
def rotate_and_write(
    token, qkv, position, slot, cos, sin, heads, kv_heads, size, q_norm, k_norm, epsilon, q_out,
    keys, values, key_scales, value_scales,
):  # fmt: skip
    """Rotate a token's queries into q_out [n, heads, size]; rotate its keys and put keys and values into its slot.

    keys of a layer: [slots / 16, kv_heads, size, 16], so that 16 neighbouring keys fill the lanes;
    values: [slots / 16, kv_heads, 16, size]; their scales, if the format has any: [slots / 16, kv_heads, 16].
    `q_norm`, `k_norm` are [size], or empty for none.
    """
    width = (heads + 2 * kv_heads) * size
    normed, key = np.empty(size, np.float32), np.empty(size, np.float32)
    angle = position * (size // 2)
    for head in range(heads):
        at = token * width + head * size
        if len(q_norm):
            _normalize(qkv, at, size, q_norm, epsilon, normed, 0)
            _rotate(normed, 0, size, cos, sin, angle, q_out, (token * heads + head) * size)
        else:
            _rotate(qkv, at, size, cos, sin, angle, q_out, (token * heads + head) * size)
    tile, lane = slot // LANES, slot % LANES
    for head in range(kv_heads):
        at = token * width + (heads + head) * size
        if len(k_norm):
            _normalize(qkv, at, size, k_norm, epsilon, normed, 0)
            _rotate(normed, 0, size, cos, sin, angle, key, 0)
        else:
            _rotate(qkv, at, size, cos, sin, angle, key, 0)
        base, scale_at = (tile * kv_heads + head) * size * LANES, (tile * kv_heads + head) * LANES + lane
        factor = _scale_of(key, 0, size, key_scales, scale_at)
        for k in range(size):
            put(keys, base + k * LANES + lane, key[k] * factor)
        at = token * width + (heads + kv_heads + head) * size
        factor = _scale_of(qkv, at, size, value_scales, scale_at)
        for k in range(size):
            put(values, base + lane * size + k, qkv[at + k] * factor)
