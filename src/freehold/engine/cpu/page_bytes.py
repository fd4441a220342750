"""Copies a cache group's page from and to all its layers.

Pages of whole tiles are copied as stored. Smaller ones share tiles with other pages, and keys are transposed in a tile,
so their numbers are copied one by one: [head, slot, number] for each layer's keys and values, [head, slot] for scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from freehold.contract.arrays import Int32, UInt8
from freehold.engine.cpu.caches import LANES, GroupCache
from freehold.engine.cpu.simd import stream
from freehold.models.spec import KVCache

WORDS = 4  # streamed at a time


class _Rows(NamedTuple):
    """Rows of a flat uint32 array: row i is `words` numbers from `begin` + i * `stride` on."""

    flat: Any
    begin: int
    stride: int
    words: int

    @property
    def is_aligned(self) -> bool:
        """Whether each row is aligned to 16 bytes."""
        return self.flat.ctypes.data % 16 == self.begin % WORDS == self.stride % WORDS == 0


@njit(nogil=True, cache=True)
def _copy(source, pages, target, to, streams):
    """Copy row pages[i] of `source` to row to[i] of `target`. With `streams` bypass the caches: the old contents need
    not be read, and the next reader comes much later."""
    words = source.words
    for i in range(len(pages)):
        at, out = source.begin + pages[i] * source.stride, target.begin + to[i] * target.stride
        if streams:
            for k in range(0, words, WORDS):
                stream(source.flat, at + k, target.flat, out + k)
        else:
            for k in range(words):
                target.flat[out + k] = source.flat[at + k]


@njit(nogil=True, cache=True)
def _copy_slots(slots, pages, page_size, packed, to, is_gather):
    """Copy between `slots` and `packed` [pages, heads * page_size * size]."""
    tiles, size = slots.tiles, slots.size
    for i in range(len(pages)):
        for slot in range(page_size):
            position = pages[i] * page_size + slot
            tile, lane = position // LANES, position % LANES
            for head in range(slots.heads):
                at = tile * slots.tile_step + head * size * LANES + lane * slots.lane_step
                out = (head * page_size + slot) * size
                for k in range(size):
                    if is_gather:
                        packed[to[i], out + k] = tiles[at + k * slots.number_step]
                    else:
                        tiles[at + k * slots.number_step] = packed[to[i], out + k]


class _Slots(NamedTuple):
    """One kind of numbers in one layer: `size` per head and slot. They are in `tiles`, flat and `tile_step` apart. In a
    tile a head has `size` times 16 numbers: neighbouring lanes are `lane_step` apart, neighbouring numbers of a lane
    `number_step`."""

    tiles: Any
    tile_step: int
    heads: int
    size: int
    lane_step: int
    number_step: int

    def page_bytes(self, page_size: int) -> int:
        return self.heads * page_size * self.size * self.tiles.itemsize


class PageBytes:
    """Copies pages of one group between the device's caches and rows of a uint8 array [pages, page_bytes]."""

    def __init__(self, cache: GroupCache):
        self._page_size = cache.page_size
        self._rows = list(_rows_of(cache))
        self._slots = list(_slots_of(cache)) if not self._rows else []
        of_slots = sum(slots.page_bytes(cache.page_size) for slots in self._slots)
        self.page_bytes = 4 * sum(row.words for row in self._rows) + of_slots

    def gather(self, pages: Int32, out: UInt8, to: Int32) -> None:
        """Copy page pages[i] to out[to[i]]."""
        self._move(pages, out, to, is_gather=True)

    def scatter(self, pages: Int32, packed: UInt8, at: Int32) -> None:
        """Copy packed[at[i]] to page pages[i]."""
        self._move(pages, packed, at, is_gather=False)

    def _move(self, pages: Int32, packed: UInt8, at: Int32, is_gather: bool) -> None:
        begin = 0
        for here in self._rows:
            there = _Rows(packed.ravel().view(np.uint32), begin // 4, packed.shape[1] // 4, here.words)
            begin += 4 * here.words
            streams = here.words % WORDS == 0 and here.is_aligned and there.is_aligned
            if is_gather:
                _copy(here, pages, there, at, streams)
            else:
                _copy(there, at, here, pages, streams)
        for slots in self._slots:
            width = slots.page_bytes(self._page_size)
            part = packed[:, begin : begin + width].view(slots.tiles.dtype)
            begin += width
            _copy_slots(slots, pages, self._page_size, part, at, is_gather)


def _rows_of(cache: GroupCache) -> Iterator[_Rows]:
    """Yield a page's contiguous runs, if it has any: each layer's state, or whole tiles."""
    for states in cache.states:
        yield _Rows(states.view(np.uint32).ravel(), 0, states.shape[1], states.shape[1])
    if cache.page_size % LANES == 0:
        flat, step, each = cache.tiles.ravel().view(np.uint32), cache.tiles.shape[1] // 4, cache.page_size // LANES
        for number in range(each if len(flat) else 0):
            yield _Rows(flat, number * step, each * step, cache.tile_bytes // 4)


def _slots_of(cache: GroupCache) -> Iterator[_Slots]:
    """Yield scales first, so that all parts are aligned to their numbers' size."""
    layers = [(kv, one) for kv, one in zip(cache.kv, cache.layout.caches, strict=True) if isinstance(one, KVCache)]
    for kv, one in layers:
        for scales in (kv.key_scales, kv.value_scales):
            if len(scales):
                yield _Slots(scales, kv.scale_step, one.head_count, 1, 1, 1)
    for kv, one in layers:
        yield _Slots(kv.keys, kv.tile_step, one.head_count, one.key_size, 1, LANES)
        if len(kv.values):
            yield _Slots(kv.values, kv.tile_step, one.head_count, one.value_size, one.value_size, 1)
