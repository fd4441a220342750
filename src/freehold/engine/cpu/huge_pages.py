"""Memory in huge pages of 2 MB, where available.

A token reads 20,000 4 KB pages of weights, each with an address translation. The first write to each KV page is a page
fault: 16 tokens take 60 or more. Linux gives huge pages on request if `/sys/kernel/mm/transparent_hugepage/enabled`
says `always` or `madvise`.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from freehold.engine.cpu.cache_line import LINE
from freehold.engine.cpu.operation import address

HUGE = 2 << 20  # bytes
BLOCK = 16 * HUGE  # taken from the system by an arena at a time
Matrix = TypeVar("Matrix", bound=Any)
OF_NUMPY = 2 * HUGE  # NumPy puts arrays of this size in huge pages itself


def zeros(count: int, kind: Any) -> np.ndarray:
    """Return an array [count]. Memory is allocated on first write, in huge pages if large enough."""
    size = count * np.dtype(kind).itemsize
    return np.zeros(count, kind) if size < HUGE else _bytes(size).view(kind)


def _bytes(size: int) -> np.ndarray:
    """Return zeros aligned to a huge page."""
    memory = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared mappings have small pages
    with suppress(AttributeError, OSError):  # not Linux, or a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(memory, np.uint8)
    first = -address(found) % HUGE
    return found[first : first + size]


class Arena:
    """Packs arrays side by side. A block is freed once none of its arrays is alive."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def keep(self, array: np.ndarray) -> np.ndarray:
        """Return a copy aligned to a cache line, or the array itself if it is large."""
        if array.nbytes >= OF_NUMPY:
            return array
        size = -(-array.nbytes // LINE) * LINE
        if size > len(self._free):
            self._free = _bytes(max(size, BLOCK))
        taken, self._free = self._free[: array.nbytes], self._free[size:]
        copy = taken.view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    def keep_arrays(self, matrix: Matrix) -> Matrix:
        """Return a copy of a dataclass whose arrays are kept."""
        arrays = {name: found for name, found in vars(matrix).items() if isinstance(found, np.ndarray)}
        return replace(matrix, **{name: self.keep(found) for name, found in arrays.items()})
