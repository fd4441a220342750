"""A softmax that is computed part by part (Milakov and Gimelshein 2018).

Within a segment of keys it runs from block to block; what segments give is merged in order.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from freehold.engine.cpu.simd import (
    add,
    exp,
    keep_first,
    load,
    max_lanes,
    maximum,
    mul,
    put,
    round_bf16,
    splat,
    store,
    sub,
    sum_lanes,
)

LANES = 16
KEYS = 4 * LANES  # in a block


class Softmax(NamedTuple):
    """So far, of each row: [rows, value size] the weighted sum of values, [rows] the highest score and the sum of
    weights."""

    sums: Any
    highest: Any
    weights: Any


@njit(inline="always")
def highest_visible(scores, at, hidden, valid):
    """The highest of a row's scores, which begin at `at`. Keys `hidden` up to `valid` of the block are visible to this
    row: scores of the rest become -inf."""
    low = splat(np.float32(-np.inf))
    if hidden > 0:
        scores[at : at + hidden] = np.float32(-np.inf)
    top = low
    for t in range(0, KEYS, LANES):
        visible = load(scores, at + t)
        if valid < KEYS:
            visible = keep_first(visible, valid - t, low)
            store(scores, at + t, visible)
        top = maximum(top, visible)
    return max_lanes(top)


@njit(inline="always")
def take_block(softmax, row, scores, at, top, size, is_rounded, words):
    """Turn the scores of a row, of which `top` is the highest, into probabilities, and rescale what was summed before.
    If `is_rounded`, probabilities are bfloat16. They take the place of scores, or are put
    into `words` if there are any."""
    highest = softmax.highest[row]
    new = max(highest, top)
    weight, level = splat(np.float32(0)), splat(new)
    for t in range(0, KEYS, LANES):
        p = exp(sub(load(scores, at + t), level))
        rounded = round_bf16(p) if is_rounded else p
        if is_rounded and len(words):
            put(words, at + t, p)
        else:
            store(scores, at + t, rounded)
        weight = add(weight, rounded)
    if new > highest:
        # All lanes of `shrink` are equal; its largest is the scalar.
        shrink = exp(splat(highest - new))
        softmax.highest[row] = new
        softmax.weights[row] *= max_lanes(shrink)
        for k in range(row * size, (row + 1) * size, LANES):
            store(softmax.sums, k, mul(shrink, load(softmax.sums, k)))
    softmax.weights[row] += sum_lanes(weight)


@njit(inline="always")
def merge_segment(segment, row, whole, to, size):
    """Add row `row` of a segment's softmax to row `to` of that of the segments before it."""
    highest, before = segment.highest[row], whole.highest[to]
    if highest == -np.inf:  # the row sees no key of this segment
        return
    new = max(highest, before)
    grow, shrink = exp(splat(highest - new)), exp(splat(before - new))
    whole.highest[to] = new
    whole.weights[to] = max_lanes(shrink) * whole.weights[to] + max_lanes(grow) * segment.weights[row]
    for k in range(0, size, LANES):
        kept = mul(shrink, load(whole.sums, to * size + k))
        store(whole.sums, to * size + k, add(kept, mul(grow, load(segment.sums, row * size + k))))
