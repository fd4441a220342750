"""A softmax computed in parts (Milakov and Gimelshein 2018).

Within a segment of keys it runs from block to block; segments are merged in order.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from freehold.engine.cpu.simd import (
    add,
    exp,
    exp_bf16,
    keep_first,
    load,
    max_lanes,
    maximum,
    mul,
    put_bf16,
    splat,
    store,
    sub,
)

LANES = 16
KEYS = 4 * LANES  # in a block
SLACK = np.float32(8)  # weights may be as large as e**8: sums are rarely rescaled


class Softmax(NamedTuple):
    """The partial softmax of each row: [rows, value size] the weighted sum of values, [rows] its level, and the sum of
    weights. A weight is e**(score - level). The level is the highest score, or at most SLACK below it."""

    sums: Any
    levels: Any
    weights: Any


@njit(inline="always")
def highest_visible(scores, at, hidden, valid):
    """Return the highest of a row's scores from `at` on; -inf if it sees none. Keys `hidden` up to `valid` of the block
    are visible to this row: other scores become -inf."""
    low = splat(np.float32(-np.inf))
    if hidden > 0:
        scores[at : at + min(hidden, KEYS)] = np.float32(-np.inf)
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
    """Turn a row's scores, of which `top` is the highest, into probabilities. Return their sums, one per lane. Earlier
    sums are rescaled if the row's level is more than SLACK below `top`. If `is_rounded`, probabilities are bfloat16.
    They replace the scores, or go to `words` if it is not empty."""
    level = softmax.levels[row]
    if top > level + SLACK:
        # All lanes of `shrink` are equal; its largest is the scalar.
        shrink = exp(splat(level - top))
        softmax.levels[row] = level = top
        softmax.weights[row] *= max_lanes(shrink)
        for k in range(row * size, (row + 1) * size, LANES):
            store(softmax.sums, k, mul(shrink, load(softmax.sums, k)))
    weight, base = splat(np.float32(0)), splat(level)
    for t in range(0, KEYS, LANES):
        above = sub(load(scores, at + t), base)
        p = exp_bf16(above) if is_rounded else exp(above)
        if is_rounded and len(words):
            put_bf16(words, at + t, p)
        else:
            store(scores, at + t, p)
        weight = add(weight, p)
    return weight


@njit(inline="always")
def merge_segment(segment, row, whole, to, size):
    """Merge row `row` of a segment's softmax into row `to` of the softmax of earlier segments."""
    level, before = segment.levels[row], whole.levels[to]
    if level == -np.inf:  # the row sees no key of this segment
        return
    new = max(level, before)
    grow, shrink = exp(splat(level - new)), exp(splat(before - new))
    whole.levels[to] = new
    whole.weights[to] = max_lanes(shrink) * whole.weights[to] + max_lanes(grow) * segment.weights[row]
    for k in range(0, size, LANES):
        kept = mul(shrink, load(whole.sums, to * size + k))
        store(whole.sums, to * size + k, add(kept, mul(grow, load(segment.sums, row * size + k))))
