"""Row-wise operations: norm, activation, rotation."""

import numpy as np
from numba import njit, prange

from freehold.engine.cpu.simd import add, exp, fma, load, mul, reciprocal, splat, store, sub, sum_lanes

LANES = 16


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


@njit(nogil=True, cache=True, error_model="numpy")
def rms_norm(x, weight, epsilon, size, out):
    """x, out flat [n * size]"""
    for at in range(0, len(x), size):
        _normalize(x, at, size, weight, epsilon, out, at)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def swiglu(gate_up, size, out):
    """gate_up [n, 2 * size] -> out [n, size], both flat"""
    zero = np.float32(0)
    for row in prange(len(out) // size):
        for k in range(0, size, LANES):
            gate = load(gate_up, row * 2 * size + k)
            up = load(gate_up, row * 2 * size + size + k)
            sigmoid = reciprocal(add(splat(np.float32(1)), exp(sub(splat(zero), gate))))
            store(out, row * size + k, mul(mul(gate, sigmoid), up))


@njit(inline="always")
def _rotate(x, at, size, cos, sin, angle_at, out, out_at):
    """Rotary embedding, halves layout: pairs (k, k + size / 2)."""
    half = size // 2
    for k in range(half):
        c, s = cos[angle_at + k], sin[angle_at + k]
        low, high = x[at + k], x[at + half + k]
        out[out_at + k] = low * c - high * s
        out[out_at + half + k] = high * c + low * s


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def rotate_and_write(
    qkv, positions, slots, cos, sin, heads, kv_heads, size, q_norm, k_norm, epsilon, q_out, keys, values
):
    """Rotate queries into q_out [n, heads, size]; rotate keys and put keys and values into their slots.

    keys of a layer: [slots / 16, kv_heads, size, 16], so that 16 neighbouring keys fill the lanes;
    values: [slots / 16, kv_heads, 16, size]. `q_norm`, `k_norm` are [size], or empty for none.
    """
    width = (heads + 2 * kv_heads) * size
    for token in prange(len(positions)):
        normed = np.empty(size, np.float32)
        key = np.empty(size, np.float32)
        angle = positions[token] * (size // 2)
        for head in range(heads):
            at = token * width + head * size
            if len(q_norm):
                _normalize(qkv, at, size, q_norm, epsilon, normed, 0)
                _rotate(normed, 0, size, cos, sin, angle, q_out, (token * heads + head) * size)
            else:
                _rotate(qkv, at, size, cos, sin, angle, q_out, (token * heads + head) * size)
        tile, lane = slots[token] // LANES, slots[token] % LANES
        for head in range(kv_heads):
            at = token * width + (heads + head) * size
            if len(k_norm):
                _normalize(qkv, at, size, k_norm, epsilon, normed, 0)
                _rotate(normed, 0, size, cos, sin, angle, key, 0)
            else:
                _rotate(qkv, at, size, cos, sin, angle, key, 0)
            base = (tile * kv_heads + head) * size * LANES
            for k in range(size):
                keys[base + k * LANES + lane] = key[k]
            at = token * width + (heads + kv_heads + head) * size
            for k in range(size):
                values[base + lane * size + k] = qkv[at + k]
