"""Attention over pages against plain torch, and against itself: a row's bits never depend on its neighbours."""

import numpy as np
import pytest
import torch
from reference_attention import reference_attention

from freehold.config import KV_CACHE_DTYPES
from freehold.engine.cpu.backend import CpuBackend
from freehold.engine.cpu.batch import CpuBatch
from freehold.engine.cpu.caches import GroupCache
from freehold.engine.cpu.isa import ISAS, available, choose
from freehold.engine.cpu.items import SEGMENT, WHOLE
from freehold.models.backend import AttentionTensors, CachePlace
from freehold.models.families.rotary import base_frequencies
from freehold.models.spec import Attention, CacheLayout, Latent, Rotary

PLAIN_TENSORS = AttentionTensors()
BEST = ISAS[choose()]


def layer(heads: int, kv_heads: int, size: int, **fields) -> Attention:
    return Attention(heads, kv_heads, size, Rotary(tuple(base_frequencies(10000.0, size).tolist())), **fields)


def cache_of(mixer, pages, page_size, kind="float32"):
    layout = CacheLayout(None, False, mixer.window is not None, ((0, 0),), (mixer.cache,))
    return GroupCache(layout, pages, page_size, kind)


def soiled_cache(mixer, pages, page_size, kind="float32"):
    """Slots hold NaN until they are written: whoever reads one shows it."""
    cache = cache_of(mixer, pages, page_size, kind)
    (kv,) = cache.kv
    for array in (kv.keys, kv.values):
        array[:] = {"float32": np.nan, "bfloat16": 0x7FC0, "int8": 127}[kind]
    for array in (kv.key_scales, kv.value_scales):
        array[:] = np.nan
    return cache


def attend(backend, attention, qkv, batch, tensors=PLAIN_TENSORS) -> np.ndarray:
    return backend.attention(CachePlace(0, 0), attention, tensors)(qkv, [batch])


def attention_run(attention, page_size, tokens, chunks, seed=0, kind="float32", tensors=PLAIN_TENSORS, isa=BEST):
    """Attention outputs of one sequence computed in `chunks`, and the qkv that went in."""
    rng = np.random.default_rng(seed)
    pages = -(-tokens // page_size)
    backend = CpuBackend([soiled_cache(attention, pages + 3, page_size, kind)], 1e-5, max(tokens, 1024), isa=isa)
    width = (attention.head_count + 2 * attention.kv_head_count) * attention.head_size
    qkv = rng.standard_normal((tokens, width)).astype(np.float32)
    table = rng.permutation(np.arange(1, pages + 4))[:pages].astype(np.int32)[None, :]
    outputs, at = [], 0
    for count in chunks:
        batch = CpuBatch.of(table, page_size, np.array([0]), np.array([at]), np.array([count]))
        outputs.append(attend(backend, attention, qkv[at : at + count].copy(), batch, tensors))
        at += count
    assert at == tokens
    return np.concatenate(outputs), qkv


def rotated(qkv, attention):
    """q, k, v as torch tensors, q and k with rotary embedding as transformers writes it."""
    tokens, size = len(qkv), attention.head_size
    angles = torch.arange(tokens)[:, None].float() * torch.tensor(attention.rotary.frequencies)
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
    heads = torch.from_numpy(qkv).view(tokens, -1, size)
    q, k, v = heads.split([attention.head_count, attention.kv_head_count, attention.kv_head_count], dim=1)

    def rotate(x):
        half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], dim=-1)
        return x * cos + half * sin

    return rotate(q), rotate(k), v


@pytest.mark.sampled(7)
@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (4, 4, 32), (8, 2, 128), (6, 1, 16)])
def test_paged_attention_equals_the_reference(page_size, heads, kv_heads, size):
    attention = layer(heads, kv_heads, size)
    out, qkv = attention_run(attention, page_size, 150, [70, 1, 1, 64, 14])
    q, k, v = rotated(qkv, attention)
    expected = reference_attention(q, k, v, first=0).reshape(150, -1)
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KV_CACHE_DTYPES)
def test_attention_is_the_same_bits_for_any_chunks_and_pages(kind):
    attention = layer(9, 3, 64)
    whole, _ = attention_run(attention, 16, 150, [150], kind=kind)
    assert np.isfinite(whole).all()
    for page_size in (1, 4, 64, 256):
        for chunks in ([150], [1] * 150, [7] * 21 + [3], [64, 64, 22]):
            out, _ = attention_run(attention, page_size, 150, chunks, kind=kind)
            np.testing.assert_array_equal(out, whole)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("window", [2, 16, 63, 64, 65, 100, 149, 150])
def test_attention_with_a_window(page_size, window):
    """As the reference, the same bits for any chunks, and nothing is read below the window's first block."""
    attention = layer(6, 2, 32, window=window)
    whole, qkv = attention_run(attention, 16, 150, [150])
    q, k, v = rotated(qkv, attention)
    expected = reference_attention(q, k, v, 0, window - 1).reshape(150, -1)
    np.testing.assert_allclose(whole, expected.numpy(), rtol=1e-4, atol=1e-5)
    for chunks in ([70, 1, 1, 64, 14], [1] * 150):
        out, _ = attention_run(attention, page_size, 150, chunks)
        np.testing.assert_array_equal(out, whole)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_a_window_reads_nothing_behind_its_block(page_size):
    """What is older than the block of 64 where the window begins may be anything, even no number."""
    attention = layer(6, 2, 32, window=40)
    expected, qkv = attention_run(attention, 16, 300, [299, 1])
    pages = -(-300 // page_size)
    cache = cache_of(attention, pages, page_size)
    backend = CpuBackend([cache], 1e-5, 1024)
    table = np.arange(1, pages + 1, dtype=np.int32)[None, :]
    rows, one = np.array([0]), np.array([1])
    first = CpuBatch.of(table, page_size, rows, np.array([0]), np.array([299]))
    attend(backend, attention, qkv[:299].copy(), first)
    begin = (299 - 39) // 64 * 64 + page_size  # slots of that position on; page 0 comes before all
    cache.tiles[: begin // 16].view(np.float32)[:] = np.nan
    batch = CpuBatch.of(table, page_size, rows, np.array([299]), one, may_share=False)
    np.testing.assert_array_equal(attend(backend, attention, qkv[299:].copy(), batch), expected[299:])


@pytest.mark.parametrize("kind", KV_CACHE_DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_capped_scores_and_sinks(page_size, kind):
    """As the reference with float32; with any format the same bits for any chunks and pages."""
    attention = layer(6, 2, 64, scale=0.7, soft_cap=3.0)
    sinks = np.linspace(-2, 3, 6, dtype=np.float32)
    tensors = AttentionTensors(sinks=sinks)
    whole, qkv = attention_run(attention, 16, 150, [150], kind=kind, tensors=tensors)
    if kind == "float32":
        q, k, v = rotated(qkv, attention)
        expected = reference_attention(q, k, v, 0, scale=0.7, cap=3.0, sinks=torch.from_numpy(sinks))
        np.testing.assert_allclose(whole, expected.reshape(150, -1).numpy(), rtol=1e-4, atol=1e-5)
    for chunks in ([70, 1, 1, 64, 14], [1] * 150):
        out, _ = attention_run(attention, page_size, 150, chunks, kind=kind, tensors=tensors)
        np.testing.assert_array_equal(out, whole)


@pytest.mark.parametrize("kind", KV_CACHE_DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_latents(page_size, kind):
    """The value of a latent is its first numbers. Only the last ones are rotated."""
    rotary = Rotary(tuple(base_frequencies(10000.0, 16).tolist()))
    latent = Latent(head_count=6, rank=48, plain_size=16, value_size=16, rotary=rotary, scale=0.2)
    rng, tokens = np.random.default_rng(3), 150
    queries = rng.standard_normal((tokens, 6 * 64)).astype(np.float32)
    latents = rng.standard_normal((tokens, 64)).astype(np.float32)

    def run(size, chunks):
        pages, outputs, at = -(-tokens // size), [], 0
        backend = CpuBackend([soiled_cache(latent, pages, size, kind)], 1e-5, 1024)
        table = (1 + rng.permutation(pages)).astype(np.int32)[None, :]
        for count in chunks:
            batch = CpuBatch.of(table, size, np.array([0]), np.array([at]), np.array([count]))
            part = slice(at, at + count)
            outputs.append(backend.latent_attention(CachePlace(0, 0), latent)(queries[part], latents[part], [batch]))
            at += count
        return np.concatenate(outputs)

    whole = run(16, [tokens])
    for chunks in ([70, 1, 1, 64, 14], [1] * tokens):
        np.testing.assert_array_equal(run(page_size, chunks), whole)
    if kind != "float32":
        return
    angles = torch.arange(tokens)[:, None].float() * torch.tensor(rotary.frequencies)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotate(x):
        pairs = torch.complex(*x[..., 48:].chunk(2, dim=-1)) * turn
        return torch.cat([x[..., :48], pairs.real, pairs.imag], dim=-1)

    q, k = rotate(torch.from_numpy(queries).view(tokens, 6, 64)), rotate(torch.from_numpy(latents)[:, None])
    expected = reference_attention(q, k, k[..., :48], 0, scale=0.2).reshape(tokens, -1)
    np.testing.assert_allclose(whole, expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "error"), [("bfloat16", 0.02), ("int8", 0.03)])
def test_attention_over_rounded_kv_is_near(kind, error):
    attention = layer(9, 3, 64)
    exact, _ = attention_run(attention, 16, 150, [150])
    rounded, _ = attention_run(attention, 16, 150, [150], kind=kind)
    assert 0 < np.abs(rounded - exact).max() < error * np.abs(exact).max()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sizes", [(9, 3, 64), (4, 4, 32), (8, 2, 128), (4, 1, 192), (5, 1, 80)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_attention_is_the_same_bits_with_every_instruction_set_but_one(sizes, window, cap):
    """Whether pairs of bfloat16 are multiplied or floats; and in any chunks. AMX adds in another order."""
    attention = layer(*sizes, window=window, soft_cap=cap)
    sinks = AttentionTensors(sinks=np.linspace(-1, 2, sizes[0], dtype=np.float32))
    expected, _ = attention_run(attention, 4, 150, [150], kind="bfloat16", tensors=sinks, isa=ISAS["portable"])
    for isa in available():
        same = expected
        if isa == "amx":
            same, _ = attention_run(attention, 4, 150, [150], kind="bfloat16", tensors=sinks, isa=ISAS[isa])
            np.testing.assert_allclose(same, expected, rtol=0.01, atol=0.01)
        for chunks in ([70, 1, 79], [13] * 11 + [7], [1] * 150):
            out, _ = attention_run(attention, 16, 150, chunks, kind="bfloat16", tensors=sinks, isa=ISAS[isa])
            np.testing.assert_array_equal(out, same)


@pytest.mark.parametrize("kind", KV_CACHE_DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_sequences_that_share_pages_get_the_same_bits_together_and_alone(kind, page_size):
    """Seven with 200 positions in common, two of them with 300, one that shares nothing, one that is short."""
    attention, rng = layer(9, 3, 64), np.random.default_rng(7)
    lengths = [201, 230, 310, 311, 250, 202, 390, 333, 40]
    shared = [200, 200, 200, 300, 200, 200, 200, 0, 32]
    columns = 400 // page_size + 1
    backend = CpuBackend([soiled_cache(attention, columns * 9, page_size, kind)], 1e-5, 1024)
    tables = (1 + rng.permutation(columns * 9)).astype(np.int32).reshape(9, columns)
    for row, common in enumerate(shared[1:], start=1):
        first = 2 if row == 3 else 0
        tables[row, : common // page_size] = tables[first, : common // page_size]
    width = 15 * 64
    for row, length in enumerate(lengths):
        start = shared[row] // page_size * page_size if row else 0
        prompt = rng.standard_normal((length - start, width)).astype(np.float32)
        one = CpuBatch.of(tables, page_size, np.array([row]), np.array([start]), np.array([length - start]))
        attend(backend, attention, prompt, one)
    rows, starts, counts = np.arange(9), np.array(lengths), np.ones(9, np.int64)
    qkv = rng.standard_normal((9, width)).astype(np.float32)
    batch = CpuBatch.of(tables, page_size, rows, starts, counts)
    assert batch.item_shared.max() >= 192
    assert len(batch.item_shared) < 9
    together = attend(backend, attention, qkv, batch)
    assert np.isfinite(together).all()
    for row in range(9):
        one = CpuBatch.of(tables, page_size, rows[row : row + 1], starts[row : row + 1], counts[:1])
        np.testing.assert_array_equal(together[row], attend(backend, attention, qkv[row : row + 1], one)[0])


@pytest.mark.parametrize("kind", KV_CACHE_DTYPES)
@pytest.mark.parametrize("tensors", [PLAIN_TENSORS, AttentionTensors(sinks=np.linspace(-1, 2, 6, dtype=np.float32))])
def test_segments_by_several_threads_have_the_bits_of_segments_in_order(kind, tensors):
    """The end of a context of three segments: one query or five as parts, in a prompt, and in a crowd that is not
    split. Two of the crowd share the first two segments."""
    attention, rng = layer(6, 2, 64), np.random.default_rng(3)
    tokens, columns = 2 * SEGMENT + 300, (3 * SEGMENT) // 16
    backend = CpuBackend([soiled_cache(attention, 10 * columns, 16, kind)], 1e-5, 4 * SEGMENT)
    tables = (1 + rng.permutation(10 * columns - 1))[: 9 * columns].astype(np.int32).reshape(9, columns)
    tables[1, : 2 * SEGMENT // 16] = tables[0, : 2 * SEGMENT // 16]
    qkv = rng.standard_normal((tokens, 10 * 64)).astype(np.float32)

    def run(rows, starts, counts, inputs):
        batch = CpuBatch.of(tables, 16, np.array(rows), np.array(starts), np.array(counts))
        return batch, attend(backend, attention, inputs.copy(), batch, tensors)

    for row in (0, 1):
        whole, outputs = run([row], [0], [tokens], qkv)
        assert len(whole.joined.items) == 0
    for row in range(2, 9):
        run([row], [0], [40], qkv[:40])
    for count in (1, 5):
        parts, last = run([0], [tokens - count], [count], qkv[-count:])
        assert parts.joined.segments.tolist() == [3]
        np.testing.assert_array_equal(last, outputs[-count:])
    pair, both = run([0, 1], [tokens - 1] * 2, [1, 1], qkv[[-1, -1]])
    assert (pair.item_shared.tolist(), pair.joined.segments.tolist()) == ([2 * SEGMENT], [3])
    np.testing.assert_array_equal(both, outputs[[-1, -1]])
    few, some = run([0, 1, 2], [tokens - 1, tokens - 1, 40], [1, 1, 1], qkv[[-1, -1, 40]])
    assert sorted(few.parts.segments.tolist()) == [WHOLE, 0, 1, 2]
    np.testing.assert_array_equal(some[:2], outputs[[-1, -1]])
    starts = [tokens - 1, tokens - 20] + [40] * 7
    counts = [1, 20] + [40] * 7
    crowd, all_of_it = run(range(9), starts, counts, qkv[[-1, *range(-20, 0), *[40] * 280]])
    assert set(crowd.parts.segments.tolist()) == {WHOLE}
    np.testing.assert_array_equal(all_of_it[:21], outputs[[-1, *range(-20, 0)]])


def test_attention_over_several_segments_is_that_of_float64():
    attention, tokens = layer(4, 2, 32), 2 * SEGMENT + 100
    outputs, qkv = attention_run(attention, 64, tokens, [tokens - 3, 3])
    q, k, v = (x.double() for x in rotated(qkv, attention))
    scores = torch.einsum("hd,thd->ht", q[-1], k.repeat_interleave(2, dim=1)) * 32**-0.5
    expected = torch.einsum("ht,thd->hd", scores.softmax(-1), v.repeat_interleave(2, dim=1)).reshape(-1)
    np.testing.assert_allclose(outputs[-1], expected.numpy(), rtol=1e-4, atol=1e-6)


def test_several_sequences_in_one_batch_do_not_see_each_other():
    attention = layer(4, 2, 32)
    backend = CpuBackend([cache_of(attention, 20, 4)], 1e-5, 1024)
    rng = np.random.default_rng(5)
    tables = rng.permutation(np.arange(1, 21)).astype(np.int32).reshape(4, 5)
    qkv = rng.standard_normal((20, 8 * 32)).astype(np.float32)
    rows, counts = np.array([2, 0, 3]), np.array([9, 1, 10])
    batch = CpuBatch.of(tables, 4, rows, np.zeros(3, np.int64), counts)
    together = attend(backend, attention, qkv.copy(), batch)
    for i, start in enumerate((0, 9, 10)):
        part = slice(start, start + counts[i])
        single = CpuBatch.of(tables, 4, rows[i : i + 1], np.zeros(1, np.int64), counts[i : i + 1])
        alone = attend(backend, attention, qkv[part].copy(), single)
        np.testing.assert_array_equal(together[part], alone)
