"""Sorting in compiled code. NumPy's functions take seconds to compile."""

import numpy as np
from numba import njit


@njit(nogil=True, error_model="numpy")
def ascending(keys):
    """Return int64 [n], the stable order that sorts `keys`, by a bottom-up merge sort."""
    order, merged, length = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64), 1
    for i in range(len(keys)):
        order[i] = i
    while length < len(keys):
        for begin in range(0, len(keys), 2 * length):
            middle, end = min(begin + length, len(keys)), min(begin + 2 * length, len(keys))
            one, other = begin, middle
            for to in range(begin, end):
                if other == end or (one < middle and keys[order[one]] <= keys[order[other]]):
                    merged[to] = order[one]
                    one += 1
                else:
                    merged[to] = order[other]
                    other += 1
        order, merged, length = merged, order, 2 * length
    return order
