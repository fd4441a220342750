"""What layers keep on the CPU for later tokens: KV in tiles, and states."""

from __future__ import annotations

import numpy as np

from freehold.arrays import Float32
from freehold.engine.cpu.huge_pages import zeros
from freehold.models.spec import CacheLayout, KVCache, StateCache

LANES = 16
_DTYPES = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}


class LayerKV:
    """The KV of all pages in one layer: keys [tiles, heads, key_size, 16] and values [tiles, heads, 16, value_size],
    flat; a tile is 16 slots. Latents have no values. Memory is touched only when written.

    `kind`: float32, bfloat16 (kept as uint16), or int8 with a float32 scale for each position and head:
    [tiles, heads, 16], flat, empty for the others.
    """

    def __init__(self, cache: KVCache, slot_count: int, kind: str):
        positions = -(-slot_count // LANES) * LANES * cache.head_count
        values, dtype = 0 if cache.is_latent else positions, _DTYPES[kind]
        self.keys = zeros(positions * cache.key_size, dtype)
        self.values = zeros(values * cache.value_size, dtype)
        self.key_scales = np.zeros(positions if kind == "int8" else 0, np.float32)
        self.value_scales = np.zeros(values if kind == "int8" else 0, np.float32)


class GroupCache:
    """The caches of the layers of a group: `kv` or `states`, in the order of the layout's members.

    `states`: float32 [pages + 1 + scratch, size] for each layer. What a verification computes behind the first draft
    goes to the scratch slots until it is known which drafts were right.
    """

    def __init__(self, layout: CacheLayout, page_count: int, page_size: int, kind: str, scratch: int = 0):
        self.layout, self.page_count, self.page_size = layout, page_count, page_size
        self.scratch_from = page_count + 1
        self.kv: list[LayerKV] = []
        self.states: list[Float32] = []
        for cache in layout.caches:
            if isinstance(cache, StateCache):
                self.states.append(np.zeros((page_count + 1 + scratch, cache.size), np.float32))
            else:
                self.kv.append(LayerKV(cache, (page_count + 1) * page_size, kind))
