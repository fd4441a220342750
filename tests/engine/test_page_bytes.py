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


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", [ATTENTION, LATENT, STATES], ids=["attention", "latent", "states"])
def test_pages_come_back_elsewhere(layout, kind, page_size):
    """Pages a, b, c go to the host and come back as d, e, f: each has the other's bytes, and no third page changed."""
    cache = GroupCache(layout, PAGES, page_size, kind, scratch=2)
    pages = PageBytes(cache)
    assert pages.page_bytes == layout.page_bytes(kind, page_size)
    fill(cache, 1)
    before = np.zeros((PAGES + 1, pages.page_bytes), np.uint8)
    everybody = np.arange(PAGES + 1, dtype=np.int32)
    pages.gather(everybody, before, everybody)
    host = np.zeros((9, pages.page_bytes), np.uint8)
    source, slots = np.array([5, 17, 70], np.int32), np.array([8, 1, 3], np.int32)
    pages.gather(source, host, slots)
    target = np.array([70, 6, 18], np.int32)
    pages.scatter(target, host, slots)
    after = np.zeros_like(before)
    pages.gather(everybody, after, everybody)
    np.testing.assert_array_equal(after[target], before[source])
    others = np.setdiff1d(everybody, target)
    np.testing.assert_array_equal(after[others], before[others])
    assert not host[[0, 2, 4, 5, 6, 7]].any()


@pytest.mark.parametrize("page_size", [1, 4])
def test_every_number_of_a_page_has_its_place(page_size):
    """Read slot by slot as the attention kernels do: small pages share tiles with others."""
    cache = GroupCache(ATTENTION, PAGES, page_size, "int8")
    fill(cache, 2)
    pages = PageBytes(cache)
    host = np.zeros((1, pages.page_bytes), np.uint8)
    page = 13
    pages.gather(np.array([page], np.int32), host, np.zeros(1, np.int32))
    expected = []
    for part in ("scales", "numbers"):
        for kv, one in zip(cache.kv, ATTENTION.caches, strict=True):
            for name, size in (("key", one.key_size), ("value", one.value_size)):
                flat = getattr(kv, f"{name}_scales" if part == "scales" else f"{name}s")
                step = kv.scale_step if part == "scales" else kv.tile_step
                for head in range(one.head_count):
                    for slot in range(page_size):
                        tile, lane = divmod(page * page_size + slot, 16)
                        of_tile = flat[tile * step :]
                        if part == "scales":
                            expected.append(of_tile[head * 16 + lane].tobytes())
                        else:
                            of_head = of_tile[head * size * 16 : (head + 1) * size * 16]
                            mine = of_head[lane::16] if name == "key" else of_head[lane * size : (lane + 1) * size]
                            expected.append(mine.tobytes())
    assert host.tobytes() == b"".join(expected)


@given(size=st.integers(1, 1 << 22).map(lambda lines: lines * 16), part=st.sampled_from([16, 64, 320, 2048, 18432]))
def test_neighbouring_tiles_share_no_lines_of_a_cache(size, part):
    """A cache finds lines by the lower 16 bits of their addresses, say: tiles begin at all multiples of a head's part,
    or of a page of the system if that is less."""
    distance, unit = _spread(size, part), min(1 << part.bit_length() - 1, 4096)
    assert size <= distance < size + 2 * unit
    begins = {distance * number % (1 << 16) for number in range((1 << 16) // unit)}
    assert begins == set(range(0, 1 << 16, unit))
