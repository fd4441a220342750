"""Sampling a token from a row of logits. One row at a time, so that rows are independent."""

import numpy as np
from numba import njit

from freehold.engine.cpu.ascending import ascending
from freehold.engine.cpu.simd import exp, load, mul, splat, store, sub

LANES = 16


@njit(nogil=True, cache=True)
def uniform(seed, position):
    """Return a number in [0, 1) that depends only on (seed, position): two rounds of splitmix64 (Steele, Lea and Flood
    2014), a counter-based generator, which has no state to save."""
    z = np.uint64(seed)
    for word in (np.uint64(position), np.uint64(0x9E3779B97F4A7C15)):
        z = (z ^ word) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(nogil=True, cache=True)
def mask(logits, legal):
    """Set the logits of tokens to -inf whose bit in `legal` uint32 [ceil(vocab / 32)] is 0."""
    for word in range(len(legal)):
        bits = legal[word]
        start = 32 * word
        for token in range(start, min(start + 32, len(logits))):
            if not (bits >> np.uint32(token - start)) & np.uint32(1):
                logits[token] = -np.inf


@njit(nogil=True, cache=True, error_model="numpy")
def _weights(logits, temperature):
    """Return exp((logit - max) / temperature), float32 [vocab]: the largest is 1."""
    size = len(logits)
    highest = np.float32(-np.inf)
    for logit in logits:
        highest = max(highest, logit)
    weights = np.empty(size, np.float32)
    top, scale = splat(highest), splat(np.float32(1) / temperature)
    whole = size - size % LANES
    for i in range(0, whole, LANES):
        store(weights, i, exp(mul(sub(load(logits, i), top), scale)))
    for i in range(whole, size):
        weights[i] = np.exp((logits[i] - highest) / temperature)
    return weights


@njit(nogil=True, cache=True, error_model="numpy")
def _candidates(weights, total, top_k, top_p, min_p):
    """Return ids of all tokens kept by top_k, top_p (or else min_p), and maybe more: best first, ties by id."""
    cut = np.float32(min_p)
    if top_k > 0 or top_p < 1.0:
        # Few tokens carry most of the weight: lower the bar until enough are above it.
        bar = np.float32(0.0625)
        while bar > np.float32(1e-30):
            count, mass = 0, 0.0
            for w in weights:
                if w >= bar:
                    count += 1
                    mass += w
            if (top_k > 0 and count >= top_k) or (top_k <= 0 and mass >= top_p * total):
                break
            bar = bar * bar
        else:
            bar = np.float32(0)
        cut = bar
    count = 0
    for w in weights:
        count += w >= cut
    ids, keys, at = np.empty(count, np.int64), np.empty(count, np.float32), 0
    for i in range(len(weights)):
        if weights[i] >= cut:
            ids[at], keys[at] = i, -weights[i]
            at += 1
    order = ascending(keys)
    for k in range(count):
        order[k] = ids[order[k]]
    return order


@njit(nogil=True, cache=True, error_model="numpy")
def draw(logits, temperature, top_k, top_p, min_p, chance):
    """Sample a token from logits float32 [vocab] with chance in [0, 1), by inverting the cumulative distribution after
    top_k, then top_p, then min_p."""
    weights = _weights(logits, temperature)
    total = 0.0
    for w in weights:
        total += w
    if top_k <= 0 and top_p >= 1.0 and min_p <= 0.0:
        goal, running, last = chance * total, 0.0, 0
        for i in range(len(weights)):
            if weights[i] > 0:
                running += weights[i]
                last = i
                if running > goal:
                    return i
        return last
    ids = _candidates(weights, total, top_k, top_p, min_p)
    if 0 < top_k < len(ids):
        ids = ids[:top_k]
    if top_k > 0:
        total = 0.0
        for i in ids:
            total += weights[i]
    kept, mass = 0, 0.0
    while kept < len(ids) and (kept == 0 or (mass < top_p * total and weights[ids[kept]] >= min_p)):
        mass += weights[ids[kept]]
        kept += 1
    goal, running = chance * mass, 0.0
    for i in ids[:kept]:
        running += weights[i]
        if running > goal:
            return i
    return ids[kept - 1]


@njit(nogil=True, cache=True, error_model="numpy")
def penalize(logits, in_prompt, counts, repetition, presence, frequency):
    """Penalize in place. `counts` int32 [vocab] of the output, `in_prompt` bool [vocab]. Repetition as in CTRL (Keskar
    et al. 2019), presence and frequency as in the OpenAI API."""
    for i in range(len(logits)):
        if counts[i] > 0 or in_prompt[i]:
            logits[i] = logits[i] / repetition if logits[i] > 0 else logits[i] * repetition
        if counts[i] > 0:
            logits[i] -= frequency * counts[i] + presence
