"""The model of the simulated engine: what it samples after a prefix, and what it writes into slots.

The identity of a prefix is a chained hash of its namespace and tokens. The token sampled after it is a
function of the identity, so outputs are known without running. Compiled, because the simulator spends its
time here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from freehold.arrays import Int32

UInt64 = npt.NDArray[np.uint64]


def seed_of(namespace: str) -> np.uint64:
    """The identity of the empty prefix."""
    return np.uint64(int.from_bytes(namespace.encode()[:7] + b"\1", "little"))


@njit(cache=True)
def mix(state, token):
    """The identity of a prefix, one token longer (a multiply-xorshift hash)."""
    z = (state ^ (np.uint64(token) + np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
    return z ^ (z >> np.uint64(29))


@njit(cache=True)
def next_token(identity, vocab_size):
    return np.int32((identity >> np.uint64(20)) % np.uint64(vocab_size))


@njit(cache=True)
def extend_identities(identities, tokens, start, end, seed):
    """Fill identities[start:end] of a sequence's prefixes."""
    state = identities[start - 1] if start else seed
    for i in range(start, end):
        state = mix(state, tokens[i])
        identities[i] = state


@njit(cache=True)
def continue_cold(tokens, count, vocab_size, seed):
    """`count` tokens that a cold run samples after `tokens`."""
    state = seed
    for token in tokens:
        state = mix(state, token)
    out = np.empty(count, np.int32)
    for i in range(count):
        out[i] = next_token(state, vocab_size)
        state = mix(state, out[i])
    return out


@njit(cache=True)
def slot_content(identity, weights):
    """What a slot holds: the prefix that wrote it, and the weights that did. Never 0, which is poison."""
    return mix(identity, weights) | np.uint64(1)


OK, WRONG_KV, NO_PAGE = 0, 1, 2


@njit(cache=True)
def read_and_write(slots, table, page_size, identities, written_by, start, end):
    """Check that positions below `start` of a sequence hold its own prefix, then write start .. end.

    -> (OK or what is wrong, position). `written_by` int32 [positions]: the weights that wrote each.
    """
    for position in range(end):
        page = table[position // page_size]
        if page == 0:
            return NO_PAGE, position
        slot = page * page_size + position % page_size
        content = slot_content(identities[position], written_by[position])
        if position < start:
            if slots[slot] != content:
                return WRONG_KV, position
        else:
            slots[slot] = content
    return OK, 0


def expected_output(prompt: Int32, count: int, vocab_size: int, namespace: str = "") -> list[int]:
    """What a cold run of the simulated model gives."""
    return continue_cold(np.asarray(prompt, np.int32), count, vocab_size, seed_of(namespace)).tolist()
