"""Arrays in huge pages are arrays like others."""

import gc
import weakref

import numpy as np
import pytest

from freehold.engine.cpu import huge_pages
from freehold.engine.cpu.cache_line import LINE
from freehold.engine.cpu.huge_pages import BLOCK, HUGE, Arena, zeros
from freehold.engine.cpu.operation import address


@pytest.mark.parametrize("count", [0, 1, 1000, HUGE // 4, HUGE // 4 + 5, 3 * HUGE])
def test_zeros(count):
    found = zeros(count, np.float32)
    assert found.shape == (count,)
    assert not found.any()
    found[:] = np.arange(count)
    np.testing.assert_array_equal(found, np.arange(count, dtype=np.float32))
    assert found.nbytes < HUGE or address(found) % HUGE == 0


def test_an_arena_keeps_arrays_apart():
    """Each begins at a cache line and is its own memory, in as many blocks as it takes."""
    rng, arena = np.random.default_rng(0), Arena()
    kinds = (np.uint8, np.int8, np.int16, np.uint16, np.float32)
    arrays = [np.zeros((0,), np.int16), rng.integers(0, 9, (3, 5)).astype(np.int8)]
    arrays += [rng.integers(0, 127, rng.integers(1, HUGE // 4)).astype(kinds[i % 5]) for i in range(120)]
    assert sum(one.nbytes for one in arrays) > BLOCK
    kept = [arena.keep(one) for one in arrays]
    for one in arrays:
        one += 1  # they are copies
    for one, copy in zip(arrays, kept, strict=True):
        assert (copy.dtype, copy.shape) == (one.dtype, one.shape)
        assert copy.size == 0 or address(copy) % LINE == 0
        np.testing.assert_array_equal(copy + 1, one)


def test_memory_is_given_back(monkeypatch):
    """A block goes once none of its arrays is there any more."""
    taken: list[weakref.ref] = []
    mapped = huge_pages.mmap.mmap

    class Mapped(mapped):
        pass

    def count(*arguments):
        found = Mapped(*arguments)
        taken.append(weakref.ref(found))
        return found

    monkeypatch.setattr(huge_pages.mmap, "mmap", count)
    arena = Arena()
    kept = [arena.keep(np.ones(HUGE, np.uint8)) for _ in range(BLOCK // HUGE + 1)]
    assert len(taken) == 2
    del kept[:-1], arena
    gc.collect()
    assert [one() is None for one in taken] == [True, False]
    kept.clear()
    gc.collect()
    assert [one() is None for one in taken] == [True, True]
