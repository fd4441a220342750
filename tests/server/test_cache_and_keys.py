"""Looking into the cache, API keys, and a body for everything that the schema says."""

import httpx
import pytest

from freehold.server.child import running_server


def test_lookup_says_how_much_would_hit_and_why_not_more(url):
    prompt = "Something that is cached, because it has been asked before, and is long enough for a few pages of it."
    httpx.post(f"{url}/v1/completions", json={"prompt": prompt, "max_tokens": 2}, timeout=60)
    found = httpx.post(f"{url}/v1/cache/lookup", json={"prompt": prompt}).json()
    assert found["reason"] == "hit"
    assert found["cached_tokens"]["device"] == (found["tokens"] - 1) // 16 * 16 > 0
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": prompt}).json()["tokens"]
    assert httpx.post(f"{url}/v1/cache/lookup", json={"token_ids": tokens}).json() == found
    salted = httpx.post(f"{url}/v1/cache/lookup", json={"token_ids": tokens, "cache_salt": "tenant"}).json()
    assert (salted["cached_tokens"]["device"], salted["reason"]) == (0, "namespace")
    chat = {"messages": [{"role": "user", "content": "never asked"}]}
    assert httpx.post(f"{url}/v1/cache/lookup", json=chat).json()["tokens"] > 10
    for wrong in ({}, {"prompt": "a", "token_ids": [1]}, {"token_ids": []}, {"token_ids": [10**8]}):
        assert httpx.post(f"{url}/v1/cache/lookup", json=wrong).status_code == 400


def test_the_cache_as_a_whole(url):
    cache = httpx.get(f"{url}/v1/cache").json()
    pages = cache["pages"]
    assert sum(count for owner, count in pages.items() if owner != "capacity") == pages["capacity"]
    assert cache["top_prefixes"]
    assert {"hit", "evicted"} == set(cache["page_ages_in_steps"])


@pytest.fixture(scope="module")
def guarded():
    with running_server(
        "--api-key", "user", "--admin-api-key", "root", "--num-pages", "100", "--allow-any-model"
    ) as url:
        yield url


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/health", None, 200),
        ("/v1/models", None, 401),
        ("/v1/models", "wrong", 401),
        ("/v1/models", "user", 200),
        ("/v1/models", "root", 200),
        ("/debug/memory", None, 401),
        ("/debug/memory", "user", 403),
        ("/debug/memory", "root", 200),
        ("/flush_cache", "user", 403),
        ("/v1/cache", "user", 403),
        ("/metrics", "user", 200),
    ],
)
def test_keys(guarded, path, key, status):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    assert httpx.get(f"{guarded}{path}", headers=headers).status_code == status


def test_the_anthropic_header_counts_too(guarded):
    body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    assert httpx.post(f"{guarded}/v1/messages", json=body).json()["error"]["type"] == "authentication_error"
    assert httpx.post(f"{guarded}/v1/messages", json=body, headers={"x-api-key": "user"}, timeout=60).status_code == 200
