"""What was evicted to the host, a disk, Redis or S3 comes back: every kind of model says what it says cold."""

import os
import signal
import time
from itertools import product
from unittest import mock

import numpy as np
import pytest

from engine.exactness import always_drafting
from freehold import LLM, SamplingParams
from freehold.engine.cpu.page_bytes import PageBytes
from freehold.store.disk import DiskStore

KINDS = {"full": "qwen2", "window": "gemma3", "state": "falcon-h1", "latent": "deepseek-v2", "draft": "mistral"}
STORES = ["host", "file", "redis", "s3"]
PRECISIONS = ["float32", "bfloat16", "int8"]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
# Each store, kind, page size and precision is in several cases of `make test`; `make exact` has all of them.
CASES = [
    pytest.param(*case, marks=() if number % 7 == 0 else pytest.mark.exact, id="-".join(map(str, case)))
    for number, case in enumerate(product(STORES, KINDS, [1, 4, 16], PRECISIONS))
]
SECONDS = 20.0


def said(output) -> tuple[list[int], list[float]]:
    return output.token_ids, [entry.logprob for entry in output.logprobs]


def prompts() -> list[list[int]]:
    """Two that share most, and one of their own; longer than the window."""
    rng = np.random.default_rng(11)
    base = rng.integers(2, 258, 150).tolist()
    return [[*base, 7, 8, 9], base[:90] + rng.integers(2, 258, 30).tolist(), rng.integers(2, 258, 75).tolist()]


def options_of(kind: str, page_size: int, precision: str) -> dict:
    drafting = {"speculative_algorithm": "draft", "speculative_num_draft_tokens": 4} if kind == "draft" else {}
    return {
        "page_size": page_size, "kv_cache_dtype": precision, "linear_compute": "float32", "audit_interval": 1,
        "chunked_prefill_size": 48, **drafting,
    }  # fmt: skip


def settle(llm: LLM) -> None:
    """Until nothing is on its way between tiers, with a step of the loop for each look, as a server does at idle."""
    deadline = time.monotonic() + SECONDS
    tiers = llm.scheduler.memory.tiers
    while len(tiers.transfers) or tiers.has_work:
        assert time.monotonic() < deadline, f"transfers in flight: {[one.order.kind for one in tiers.transfers]}"
        llm.scheduler.step()
        time.sleep(0.001)
    llm.scheduler.audit()


def forget_device(llm: LLM) -> None:
    """As if others had needed the memory."""
    memory = llm.scheduler.memory
    memory.tree.evictor.evict(memory.tree.evictable_page_count, "others")
    for bounded in memory.tree.bounded:
        bounded.evict(bounded.page_count)
    assert memory.tree.page_count == 0
    memory.audit()


@pytest.fixture
def location(request, tmp_path):
    """Where a store of a kind is."""

    def of(store: str) -> dict:
        if store == "host":
            return {}
        if store == "file":
            where = str(tmp_path / "kv")
        elif store == "redis":
            where = f"redis://127.0.0.1:{request.getfixturevalue('redis_server').port}/0"
        else:
            request.getfixturevalue("s3_server")
            where = "s3://bucket/kv"
        return {"hicache_storage_backend": store, "hicache_storage_location": where}

    return of


@pytest.fixture(autouse=True)
def loads_pay():
    """Whether loading is quicker than computing depends on the machine's mood, and on tiny models it may not be."""
    with mock.patch("freehold.memory.tiers.loads.Loads.seconds", return_value=0.0):
        yield


@pytest.fixture(scope="module")
def cold(folders):
    """What an engine says that shares nothing, and holds one sequence at a time."""
    known: dict[tuple, list] = {}

    def ask(kind: str, precision: str) -> list:
        if (kind, precision) not in known:
            options = {**options_of(kind, 16, precision), "disable_radix_cache": True, "max_running_requests": 1}
            with LLM(str(folders(KINDS[kind])), **options) as llm:
                known[kind, precision] = [said(llm.generate([prompt], GREEDY)[0]) for prompt in prompts()]
        return known[kind, precision]

    return ask


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("store", "kind", "page_size", "precision"), CASES)
def test_what_was_evicted_comes_back(store, kind, page_size, precision, folders, cold, location):
    options = {
        **options_of(kind, page_size, precision), "enable_hierarchical_cache": True, "hicache_ratio": 1.0,
        "num_pages": 2048 // page_size, "hicache_storage_prefetch_policy": "wait_complete", **location(store),
    }  # fmt: skip
    model, asked, expected = str(folders(KINDS[kind])), prompts(), cold(kind, precision)
    with always_drafting(), LLM(model, **options) as llm:
        assert [said(one) for one in llm.generate(asked, GREEDY)] == expected
        settle(llm)
        if store == "host":
            forget_device(llm)
            check_return(llm, "host", expected, page_size)
            return
    with always_drafting(), LLM(model, **options) as llm:  # nothing is left but what was stored
        check_return(llm, "storage", expected, page_size)


def check_return(llm: LLM, tier: str, expected: list, page_size: int) -> None:
    asked = prompts()
    outputs = llm.generate(asked, GREEDY)
    assert [said(one) for one in outputs] == expected
    for prompt, output in zip(asked, outputs, strict=True):
        assert output.cached_tokens >= len(prompt) - 1 - page_size, "it was computed again"
    assert outputs[0].cached_by_tier[tier] >= len(asked[0]) - 1 - page_size
    assert outputs[2].cached_by_tier[tier] >= len(asked[2]) - 1 - page_size
    settle(llm)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_policies_of_writing(policy, folders, cold):
    """Too little device memory for all prompts: some were evicted when they are asked for again."""
    options = {
        **options_of("window", 16, "float32"), "enable_hierarchical_cache": True, "hicache_ratio": 4.0, "num_pages": 16,
        "hicache_write_policy": policy, "max_running_requests": 1,
    }  # fmt: skip
    with LLM(str(folders(KINDS["window"])), **options) as llm:
        hits = 0
        for _ in range(4):
            for prompt, expected in zip(prompts(), cold("window", "float32"), strict=True):
                (output,) = llm.generate([prompt], GREEDY)
                assert said(output) == expected
                hits += output.cached_by_tier.get("host", 0)
                settle(llm)
        assert hits > 0, "nothing came from the host"
        assert llm.scheduler.memory.counts().transfer == 0


# A folder can't be killed or stalled, and a bucket has no limit.
TROUBLES = [
    ("file", "full"), ("redis", "killed"), ("redis", "stalled"), ("redis", "full"), ("s3", "killed"), ("s3", "stalled"),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("store", "trouble"), TROUBLES)
def test_a_store_in_trouble_costs_hits_and_nothing_else(store, trouble, folders, cold, location, request):
    """In the middle of a batch. Requests are answered as without it, none waits for long, and no page is lost."""
    options = {
        **options_of("full", 16, "float32"), "enable_hierarchical_cache": True, **location(store),
        "hicache_storage_capacity": 100_000 if trouble == "full" else 1 << 30,
    }  # fmt: skip
    with LLM(str(folders(KINDS["full"])), **options) as llm:
        before = time.monotonic()
        requests = llm.requests(prompts() * 4, GREEDY)
        for number, one in enumerate(requests):
            llm.scheduler.add(one)
            llm.scheduler.step()
            if number == 5 and trouble != "full":
                server = request.getfixturevalue(f"{store}_server")
                server.kill() if trouble == "killed" else server.signal(signal.SIGSTOP)
        while llm.scheduler.requests:
            llm.scheduler.step()
        assert time.monotonic() - before < SECONDS
        for one, expected in zip(requests, cold("full", "float32") * 4, strict=True):
            assert (one.output.tolist(), [entry.logprob for entry in one.logprobs]) == expected
        if trouble == "stalled":
            request.getfixturevalue(f"{store}_server").signal(signal.SIGCONT)
        settle(llm)
        memory = llm.scheduler.memory
        memory.flush()
        assert all(pages.pool.free_count == pages.pool.capacity for pages in memory.tiers.host.pages)


CALLS = [(PageBytes, "gather"), (PageBytes, "scatter"), (DiskStore, "put"), (DiskStore, "get"), (DiskStore, "contains")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["window", "state"])
@pytest.mark.parametrize("phase", range(3))
@pytest.mark.parametrize(("owner", "name"), CALLS)
def test_every_third_call_of_the_mover_fails(owner, name, phase, kind, folders, cold, location):
    """With each phase, so that every call does. Answers are those of a cold run, and no page is lost."""
    options = {
        **options_of(kind, 16, "float32"), "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "num_pages": 24,
        "hicache_storage_prefetch_policy": "wait_complete", "max_running_requests": 1, **location("file"),
    }  # fmt: skip
    call, calls = getattr(owner, name), 0

    def failing(*arguments, **named):
        nonlocal calls
        calls += 1
        result = call(*arguments, **named)  # what it does before it fails is done
        if calls % 3 == phase:
            raise OSError("told to fail")
        return result

    with LLM(str(folders(KINDS[kind])), **options) as llm, mock.patch.object(owner, name, failing):
        for number in range(4):
            for prompt, expected in zip(prompts(), cold(kind, "float32"), strict=True):
                (output,) = llm.generate([prompt], GREEDY)
                assert said(output) == expected
                settle(llm)
            if number == 2:  # what is stored is asked for
                llm.scheduler.memory.flush()
        assert calls > 2
        llm.scheduler.memory.flush()
        llm.scheduler.audit()
        memory = llm.scheduler.memory
        for pool in (*memory.pools, *(pages.pool for pages in memory.tiers.host.pages)):
            assert pool.free_count == pool.capacity


def test_other_weights_find_nothing(folders, cold, tmp_path):
    """The same shape, the same prompts, another content: not one page of the other's."""
    from tiny_models import TINY_MODELS, save_random
    from torch import float32

    save_random(TINY_MODELS["qwen2"].make_config(), 6, float32, tmp_path / "other")
    options = {
        **options_of("full", 16, "float32"), "enable_hierarchical_cache": True, "hicache_storage_backend": "file",
        "hicache_storage_location": os.fspath(tmp_path / "kv"), "hicache_storage_prefetch_policy": "wait_complete",
    }  # fmt: skip
    with LLM(str(folders("qwen2")), **options) as llm:
        llm.generate(prompts(), GREEDY)
        settle(llm)
        # New weights in the engine, and the old ones again.
        llm.scheduler.update_weights(str(tmp_path / "other"))
        new = llm.generate(prompts(), GREEDY)
        assert not any(one.cached_by_tier.get("storage") or one.cached_by_tier.get("host") for one in new)
        settle(llm)
        llm.scheduler.update_weights(str(folders("qwen2")))
        again = llm.generate(prompts(), GREEDY)
        assert [said(one) for one in again] == cold("full", "float32")
        assert again[0].cached_by_tier["storage"] > 100
        settle(llm)
