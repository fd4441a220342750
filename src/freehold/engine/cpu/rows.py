"""Row-wise gates and routing."""

import math

import numpy as np
from numba import njit, prange


@njit(inline="always")
def sigmoid(x):
    return np.float32(1) / (np.float32(1) + np.float32(math.exp(-x)))


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def silu_gate(x, gate, norm, groups, epsilon, norm_first, out):
    """Compute out = x * silu(gate), [rows, columns]. With weights `norm`, repeated if fewer than columns, each of
    `groups` column groups is normalized before or after that."""
    rows, columns = x.shape
    size = columns // groups
    for work in prange(rows * groups):
        row, start = work // groups, work % groups * size
        squares = np.float32(0)
        for k in range(start, start + size):
            value = x[row, k]
            if not norm_first:
                value *= gate[row, k] * sigmoid(gate[row, k])
            out[row, k] = value
            squares += value * value
        scale = np.float32(1) / np.float32(math.sqrt(squares / np.float32(size) + epsilon))
        for k in range(start, start + size):
            if len(norm):
                out[row, k] = out[row, k] * scale * norm[k % len(norm)]
            if norm_first:
                out[row, k] *= gate[row, k] * sigmoid(gate[row, k])


@njit(nogil=True, cache=True, error_model="numpy")
def sigmoid_gate(x, gate):
    """Multiply x [rows, columns] by sigmoid(gate), gate likewise or [rows, 1]."""
    for row in range(x.shape[0]):
        for k in range(x.shape[1]):
            x[row, k] *= sigmoid(gate[row, k if gate.shape[1] > 1 else 0])


@njit(nogil=True, cache=True, error_model="numpy")
def soft_cap(x, cap):
    """Compute x = cap * tanh(x / cap), x [rows, columns]."""
    for row in range(x.shape[0]):
        for k in range(x.shape[1]):
            x[row, k] = cap * np.float32(math.tanh(x[row, k] / cap))


@njit(inline="always")
def _best(values, allowed):
    """Return the index of the largest allowed value, the first of equals."""
    best = -1
    for k in range(len(values)):
        if allowed[k] and (best < 0 or values[k] > values[best]):
            best = k
    return best


@njit(inline="always")
def _softmax(values, allowed, out):
    """Compute the softmax over allowed values; others get 0."""
    highest, total = values[_best(values, allowed)], np.float32(0)
    for k in range(len(values)):
        out[k] = np.float32(math.exp(values[k] - highest)) if allowed[k] else np.float32(0)
        total += out[k]
    for k in range(len(values)):
        out[k] /= total


@njit(inline="always")
def _allow_groups(ranks, groups, used, by_two, allowed):
    """Allow only the best `used` groups of experts, ranked by their best, or best two together."""
    size = len(ranks) // groups
    worth, is_open = np.empty(groups, np.float32), np.ones(groups, np.bool_)
    for group in range(groups):
        inside = np.zeros(len(ranks), np.bool_)
        inside[group * size : (group + 1) * size] = True
        best = _best(ranks, inside)
        worth[group] = ranks[best]
        if by_two:
            inside[best] = False
            worth[group] += ranks[_best(ranks, inside)]
    allowed[:] = False
    for _ in range(used):
        group = _best(worth, is_open)
        is_open[group] = False
        allowed[group * size : (group + 1) * size] = True


SOFTMAX, SIGMOID, CHOSEN = range(3)


@njit(nogil=True, cache=True, error_model="numpy")
def route(logits, correction, scores, normalize, factor, groups, groups_used, by_two, experts, weights):
    """Route logits [rows, experts] -> experts int64 [rows, used], ascending, and weights float32 likewise. Arguments
    are those of `freehold.models.spec.Routing`."""
    count, used = logits.shape[1], experts.shape[1]
    everything = np.ones(count, np.bool_)
    for row in range(logits.shape[0]):
        values, ranks = logits[row].copy(), np.empty(count, np.float32)
        if scores == SOFTMAX:
            _softmax(logits[row], everything, values)
        elif scores == SIGMOID:
            for k in range(count):
                values[k] = sigmoid(logits[row, k])
        for k in range(count):
            ranks[k] = values[k] + correction[k] if len(correction) else values[k]
        allowed, chosen = np.ones(count, np.bool_), np.zeros(count, np.bool_)
        if groups > 1:
            _allow_groups(ranks, groups, groups_used, by_two, allowed)
        for _ in range(used):
            best = _best(ranks, allowed)
            allowed[best], chosen[best] = False, True
        if scores == CHOSEN:
            _softmax(logits[row], chosen, values)
        total, at = np.float32(0), 0
        for k in range(count):
            if chosen[k]:
                experts[row, at], weights[row, at] = k, values[k]
                total += values[k]
                at += 1
        for k in range(used):
            weights[row, k] *= factor / (total + np.float32(1e-20)) if normalize else factor
