"""The whole numbers that a request may give."""

from __future__ import annotations

import numpy as np

WHOLE_MAX = 2**53  # JSON holds all up to it exactly, and sums of a few fit into an int64


def is_whole(value: object, least: int = -WHOLE_MAX, most: int = WHOLE_MAX) -> bool:
    """Whether it is an integer, of Python's or NumPy's, within its limits."""
    return isinstance(value, (int, np.integer)) and least <= int(value) <= most
