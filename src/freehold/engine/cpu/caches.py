"""The CPU caches of layers: KV in tiles, and states.

A tile is 16 slots. It holds their keys and values in all layers of a group, so that unused pages take no memory, and a
page of whole tiles is copied to the host in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freehold.contract.arrays import Float32, UInt8
from freehold.engine.cpu.huge_pages import zeros
from freehold.models.spec import CacheLayout, KVCache, StateCache

LANES = 16
DTYPES = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
_SYSTEM_PAGE = 4096


@dataclass(frozen=True)
class LayerKV:
    """The KV of all pages in one layer: keys [heads, key_size, 16] and values [heads, 16, value_size] of the first
    tile; the next tile's follow at `tile_step` numbers, and so on. Latents have no values.

    Numbers are float32, bfloat16 (stored as uint16), or int8 with a float32 scale for each position and head: [heads,
    16] of each tile, `scale_step` apart. Arrays are flat; scales are empty for the other types.
    """

    keys: np.ndarray
    values: np.ndarray
    key_scales: Float32
    value_scales: Float32
    tile_step: int
    scale_step: int


class _Tiles:
    """The memory of `count` tiles, divided among layers. It is touched only when written."""

    def __init__(self, caches: list[KVCache], count: int, kind: str):
        self._kind, self._at = kind, 0
        self.bytes = sum(cache.bytes_per_token(kind) for cache in caches) * LANES
        number = np.dtype(DTYPES[kind]).itemsize
        self.step = _spread(self.bytes, min(cache.key_size for cache in caches) * number * LANES)
        self.memory: UInt8 = zeros(count * self.step, np.uint8)

    def take(self, cache: KVCache) -> LayerKV:
        """Return the next layer's part."""
        dtype, heads = np.dtype(DTYPES[self._kind]), cache.head_count
        sizes = cache.key_size, 0 if cache.is_latent else cache.value_size
        keys, values = (self._cut(heads * size, dtype) for size in sizes)
        of_heads = heads if self._kind == "int8" else 0
        key_scales, value_scales = (self._cut(of_heads if size else 0, np.dtype(np.float32)) for size in sizes)
        return LayerKV(keys, values, key_scales, value_scales, self.step // dtype.itemsize, self.step // 4)

    def _cut(self, numbers: int, dtype: np.dtype) -> np.ndarray:
        """Cut the next `numbers` of each slot."""
        first = self._at
        self._at += numbers * LANES * dtype.itemsize
        return (self.memory[first:] if numbers else self.memory[:0]).view(dtype)


def _spread(size: int, part: int) -> int:
    """Return the distance of tiles of `size` bytes, of which `part` are read at a time. Caches index lines by low
    address bits: if these were equal in all tiles, a few tiles would fill the cache. The distance is an odd multiple of
    a power of two, which cycles through all values of these bits."""
    unit = min(1 << part.bit_length() - 1, _SYSTEM_PAGE)
    return (-(-size // unit) | 1) * unit


class GroupCache:
    """The caches of a group's layers: `kv` or `states`, in the order of the layout's members. `tiles` is the memory of
    `kv`: uint8 [tiles, bytes], of which the first `tile_bytes` of each are used.

    `states`: float32 [pages + 1 + scratch, size] for each layer. States after drafts go to scratch slots until the
    drafts are verified.
    """

    def __init__(self, layout: CacheLayout, page_count: int, page_size: int, kind: str, scratch: int = 0):
        self.layout, self.page_count, self.page_size = layout, page_count, page_size
        self.scratch_from = page_count + 1
        self.states: list[Float32] = [
            np.zeros((page_count + 1 + scratch, cache.size), np.float32)
            for cache in layout.caches
            if isinstance(cache, StateCache)
        ]
        self.kv: list[LayerKV] = []
        self.tiles, self.tile_bytes = np.empty((0, 0), np.uint8), 0
        if kept := [cache for cache in layout.caches if isinstance(cache, KVCache)]:
            tiles = _Tiles(kept, -(-(page_count + 1) * page_size // LANES), kind)
            self.kv = [tiles.take(cache) for cache in kept]
            self.tiles, self.tile_bytes = tiles.memory.reshape(-1, tiles.step), tiles.bytes
