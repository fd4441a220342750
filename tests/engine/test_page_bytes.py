"""The bytes of pages: gathered and scattered in any cache group, and nothing else is touched."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from freehold.engine.cpu.caches import GroupCache, _spread
from freehold.engine.cpu.page_bytes import PageBytes
from freehold.models.spec import CacheLayout, KVCache, StateCache

ATTENTION = CacheLayout(None, False, False, ((0, 0), (1, 0)), (KVCache(3, 32, 16), KVCache(1, 16, 16)))
LATENT = CacheLayout(None, False, False, ((0, 0),), (KVCache(1, 48, 32, is_latent=True),))
STATES = CacheLayout(1, True, False, ((0, 0), (1, 0)), (StateCache(7, 20), StateCache(5)))
PAGES = 70


def arrays(cache):
    kept = [array for kv in cache.kv for array in (kv.keys, kv.values, kv.key_scales, kv.value_scales)]
    return [*kept, *cache.states]


def fill(cache, seed):
    rng = np.random.default_rng(seed)
    for array in arrays(cache):
        array.view(np.uint8)[:] = rng.integers(0, 256, array.view(np.uint8).shape, np.uint8)


def content(cache, page) -> bytes:
    """What a page is, read slot by slot as the attention kernels do: scales, then numbers, of each layer."""
    slots = [divmod(page * cache.page_size + slot, 16) for slot in range(cache.page_size)]
    found = [states[page].tobytes() for states in cache.states]
    layers = list(zip(cache.kv, cache.layout.caches, strict=False))
    for kv, one in layers:
        for scales in (kv.key_scales, kv.value_scales):
            places = [tile * kv.scale_step + head * 16 + lane for head in range(one.head_count) for tile, lane in slots]
            found += [scales[at].tobytes() for at in places if len(scales)]
    for kv, one in layers:
        for head in range(one.head_count):
            for tile, lane in slots:
                at = tile * kv.tile_step + head * 16 * one.key_size
                found.append(kv.keys[at : at + 16 * one.key_size][lane::16].tobytes())
        for head in range(0 if one.is_latent else one.head_count):
            for tile, lane in slots:
                at = tile * kv.tile_step + (head * 16 + lane) * one.value_size
                found.append(kv.values[at : at + one.value_size].tobytes())
    return b"".join(found)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", [ATTENTION, LATENT, STATES], ids=["attention", "latent", "states"])
def test_pages_come_back_elsewhere(layout, kind, page_size):
    """Pages a, b, c go to the host and come back as d, e, f: each has the other's numbers. No third page changes."""
    cache = GroupCache(layout, PAGES, page_size, kind, scratch=2)
    pages = PageBytes(cache)
    assert pages.page_bytes == layout.page_bytes(kind, page_size)
    fill(cache, 1)
    before = [content(cache, page) for page in range(PAGES + 1)]
    assert {len(one) for one in before} == {pages.page_bytes}
    host = np.zeros((9, pages.page_bytes), np.uint8)
    source, slots = np.array([5, 17, 70], np.int32), np.array([8, 1, 3], np.int32)
    pages.gather(source, host, slots)
    target = np.array([70, 6, 18], np.int32)
    pages.scatter(target, host, slots)
    moved = dict(zip(target.tolist(), source.tolist(), strict=True))
    for page in range(PAGES + 1):
        assert content(cache, page) == before[moved.get(page, page)], page
    assert not host[[0, 2, 4, 5, 6, 7]].any()


@pytest.mark.parametrize("page_size", [1, 4])
def test_small_pages_are_stored_slot_by_slot(page_size):
    """They share tiles with others, and are stored in the order of their slots."""
    cache = GroupCache(ATTENTION, PAGES, page_size, "int8")
    fill(cache, 2)
    host = np.zeros((1, PageBytes(cache).page_bytes), np.uint8)
    PageBytes(cache).gather(np.array([13], np.int32), host, np.zeros(1, np.int32))
    assert host.tobytes() == content(cache, 13)


@given(size=st.integers(1, 1 << 22).map(lambda lines: lines * 16), part=st.sampled_from([16, 64, 320, 2048, 18432]))
def test_neighbouring_tiles_share_no_lines_of_a_cache(size, part):
    """A cache finds lines by the lower 16 bits of their addresses, say: tiles begin at all multiples of a head's part,
    or of a page of the system if that is less."""
    distance, unit = _spread(size, part), min(1 << part.bit_length() - 1, 4096)
    assert size <= distance < size + 2 * unit
    begins = {distance * number % (1 << 16) for number in range((1 << 16) // unit)}
    assert begins == set(range(0, 1 << 16, unit))
