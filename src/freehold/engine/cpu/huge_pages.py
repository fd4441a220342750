"""Memory in pages of 2 MB, where the system gives them.

A token reads 20,000 pages of 4 KB of weights, and each page's address is translated. The first write to each page of KV
is a page fault: 16 tokens take 60 or more. Linux gives huge pages to a process that asks for them if
`/sys/kernel/mm/transparent_hugepage/enabled` says `always` or `madvise`.
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
BLOCK = 16 * HUGE  # that an arena takes from the system at a time
Matrix = TypeVar("Matrix", bound=Any)
OF_NUMPY = 2 * HUGE  # arrays of this size are in huge pages without our help


def zeros(count: int, kind: Any) -> np.ndarray:
    """An array [count]. Memory is given when it is first written, in huge pages if they fit in."""
    size = count * np.dtype(kind).itemsize
    return np.zeros(count, kind) if size < HUGE else _bytes(size).view(kind)


def _bytes(size: int) -> np.ndarray:
    """Zeros from the start of a huge page on."""
    memory = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # what is shared has small pages
    with suppress(AttributeError, OSError):  # not Linux, or a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(memory, np.uint8)
    first = -address(found) % HUGE
    return found[first : first + size]


class Arena:
    """Arrays side by side. A block is given back once none of its arrays is there any more."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def keep(self, array: np.ndarray) -> np.ndarray:
        """A copy, from the start of a cache line on; or the array itself if it is large."""
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
        """A dataclass whose arrays are kept."""
        arrays = {name: found for name, found in vars(matrix).items() if isinstance(found, np.ndarray)}
        return replace(matrix, **{name: self.keep(found) for name, found in arrays.items()})
