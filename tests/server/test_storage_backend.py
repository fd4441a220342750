"""Storage attached, detached and cleared while the server runs; sessions saved and restored; events to follow."""

import json
import time

import httpx
import pytest
import redis

from commands import run
from freehold.server.child import free_port, running_server
from store_servers import redis_server

__all__ = ["redis_server"]
BACKEND = "/hicache/storage-backend"
STORY = "A river runs through the valley, past the mill and the three old bridges, and nobody knows how old it is. " * 4


@pytest.fixture(scope="module")
def url():
    live, replay = free_port(), free_port()
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{live}", "replay_endpoint": f"tcp://*:{replay}"}
    options = ("--enable-hierarchical-cache", "--num-pages", "200", "--kv-events-config", json.dumps(events))
    with running_server(*options) as url:
        yield url


@pytest.fixture
def attached(url, tmp_path):
    """With a folder behind the host."""
    body = {"hicache_storage_backend": "file", "hicache_storage_location": str(tmp_path)}
    put = httpx.put(f"{url}{BACKEND}", json=body, timeout=60)
    assert put.status_code == 200, put.text
    assert put.json()["state"] == "attached"
    yield url
    if httpx.get(f"{url}{BACKEND}").json()["state"] == "attached":
        assert httpx.delete(f"{url}{BACKEND}", timeout=60).status_code == 200


def flush(url):
    """Device and host forget, once nothing is being copied."""
    end = time.monotonic() + 20
    while any(one["in_flight"] for one in httpx.get(f"{url}/debug/memory").json()["tiers"]["transfers"].values()):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert httpx.post(f"{url}/flush_cache", params={"timeout": 20}, timeout=30).status_code == 200


def turn(url, name, text, max_tokens=8):
    body = {"prompt": text, "session_id": name, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["usage"]


def opened(url, name):
    """A session with one turn, and what the next turn answers."""
    httpx.post(f"{url}/v1/sessions", json={"session_id": name})
    first, _ = turn(url, name, STORY)
    return first


@pytest.mark.timeout(200)
def test_a_session_is_saved_and_comes_back(attached):
    url = attached
    opened(url, "story")
    tokens = httpx.get(f"{url}/v1/sessions/story").json()["tokens"]
    saved = httpx.post(f"{url}/v1/sessions/story/save", timeout=60).json()
    assert saved["is_complete"]
    assert saved["storage"] == saved["host"] == saved["tokens"] == (tokens - 1) // 16 * 16
    expected, _ = turn(url, "story", " And then")
    httpx.post(f"{url}/v1/sessions/story/rewind", json={"to": tokens})
    flush(url)
    restored = httpx.post(f"{url}/v1/sessions/story/restore", timeout=60).json()
    assert restored["cached_tokens"] == {"device": 0, "host": 0, "storage": saved["storage"]}
    assert restored["computed_tokens"] == tokens - saved["storage"]
    again, usage = turn(url, "story", " And then")
    assert again == expected
    assert usage["prompt_tokens_details"]["cached_tokens"] >= saved["storage"]
    httpx.delete(f"{url}/v1/sessions/story")


@pytest.mark.timeout(200)
def test_what_a_store_has_lost_is_saved_again(url, redis_server):
    place = f"redis://127.0.0.1:{redis_server.port}/0"
    body = {"hicache_storage_backend": "redis", "hicache_storage_location": place}
    assert httpx.put(f"{url}{BACKEND}", json=body, timeout=60).status_code == 200
    client = redis.Redis.from_url(place)
    opened(url, "lost")

    def save():
        saved = httpx.post(f"{url}/v1/sessions/lost/save", timeout=60).json()
        assert saved["is_complete"], saved
        assert saved["storage"] == saved["tokens"] > 0
        assert client.dbsize() >= saved["tokens"] // 16

    save()
    client.flushdb()
    save()
    flush(url)
    save()  # what storage alone has is counted
    client.flushdb()
    flush(url)
    gone = httpx.post(f"{url}/v1/sessions/lost/save", timeout=60).json()
    assert (gone["is_complete"], gone["tokens"]) == (False, 0), "nothing is left to be saved"
    httpx.delete(f"{url}/v1/sessions/lost")
    assert httpx.delete(f"{url}{BACKEND}", timeout=60).status_code == 200


@pytest.mark.timeout(200)
def test_what_is_cleared_is_not_found(attached):
    url = attached
    opened(url, "gone")
    assert httpx.post(f"{url}/v1/sessions/gone/save", timeout=60).json()["storage"] > 0
    assert httpx.post(f"{url}{BACKEND}/clear", timeout=60).json()["state"] == "attached"
    flush(url)
    restored = httpx.post(f"{url}/v1/sessions/gone/restore", timeout=60).json()
    assert restored["cached_tokens"]["storage"] == 0
    saved = httpx.post(f"{url}/v1/sessions/gone/save", timeout=60).json()
    assert saved["storage"] == saved["tokens"] > 0, "it is stored again"
    httpx.delete(f"{url}/v1/sessions/gone")


@pytest.mark.timeout(200)
def test_storage_comes_and_goes_while_requests_run(url, tmp_path):
    body = {"hicache_storage_backend": "file", "hicache_storage_location": str(tmp_path)}
    prompts = [f"{number} {STORY}" for number in range(4)]

    def ask(prompt):
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]

    expected = {prompt: ask(prompt) for prompt in prompts}
    for number in range(3):
        assert httpx.put(f"{url}{BACKEND}", json=body, timeout=60).json()["state"] == "attached"
        for prompt in prompts[: number + 1]:
            assert ask(prompt) == expected[prompt]
        flush(url)
        assert ask(prompts[number]) == expected[prompts[number]]
        assert httpx.delete(f"{url}{BACKEND}", timeout=60).json()["state"] == "detached"
        assert ask(prompts[number]) == expected[prompts[number]]
    code, said = run("cache", "verify", tmp_path)
    assert code == 0, said


def test_what_can_not_be_done_is_refused(url, tmp_path):
    params = []

    def status(method, path="", **body):
        answer = httpx.request(method, f"{url}{BACKEND}{path}", json=body or None, timeout=60)
        if answer.status_code == 400:
            params.append(answer.json()["error"]["param"])
        return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["message"]

    assert status("DELETE") == (409, "there is no storage backend: PUT /hicache/storage-backend attaches one")
    assert status("POST", "/clear")[0] == 409
    assert status("PUT", hicache_storage_backend="tape")[0] == 400
    assert status("PUT", hicache_storage_backend="redis")[0] == 400
    assert status("PUT", hicache_storage_backend="file", hicache_storage_location="s3://bucket/c")[0] == 400
    (tmp_path / "file").write_text("not a folder")
    place = {"hicache_storage_backend": "file", "hicache_storage_location": str(tmp_path / "file")}
    code, said = status("PUT", **place)
    assert code == 400
    assert said.count(str(tmp_path / "file")) == 1, said
    assert status("PUT", **place, hicache_storage_capacity=10)[0] == 400
    location, capacity = "hicache_storage_location", "hicache_storage_capacity"
    assert params == ["hicache_storage_backend", location, location, location, capacity]
    assert httpx.get(f"{url}{BACKEND}").json()["state"] == "detached"
    place["hicache_storage_location"] = str(tmp_path / "folder")
    assert status("PUT", **place) == (200, "")
    code, said = status("PUT", **place)
    assert (code, "DELETE it first" in said) == (409, True)
    assert status("DELETE") == (200, "")


def events_of(url, wanted, since=None):
    """The events of the next batches, until there is one for which `wanted` holds, and the number of the last batch."""
    found, number = [], -1
    headers = {} if since is None else {"Last-Event-ID": str(since)}
    with httpx.stream("GET", f"{url}/v1/cache/events", headers=headers, timeout=20) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line == ": following":
                time.sleep(0.2)  # until the subscription has reached the publisher
                ask = {"prompt": f"Events of {time.time()}: {STORY}", "max_tokens": 1}
                httpx.post(f"{url}/v1/completions", json=ask, timeout=60)
            if line.startswith("id: "):
                number = int(line[4:])
            if line.startswith("data: "):
                found += json.loads(line[6:])["events"]
                if any(wanted(event) for event in found):
                    return found, number
    raise AssertionError("the stream has ended")


@pytest.mark.timeout(100)
def test_events_can_be_followed_and_asked_for_again(url):
    found, number = events_of(url, lambda event: event.get("medium") == "CPU")
    stored = [event for event in found if event["type"] == "BlockStored" and event["medium"] == "GPU"]
    assert stored
    assert all(len(event["token_ids"]) == 16 * len(event["block_hashes"]) for event in stored)
    again, _ = events_of(url, lambda event: event.get("medium") == "CPU", since=number - 1)
    assert again[-1]["medium"] == "CPU"
    wrong = httpx.get(f"{url}/v1/cache/events", headers={"Last-Event-ID": "x"})
    assert wrong.status_code == 400


def test_counts_of_tiers_are_shown(url):
    turn_text, _ = turn(url, None, STORY)
    assert turn_text
    metrics = httpx.get(f"{url}/metrics").text
    for name in ("freehold_transfers_ended_total", "freehold_transfer_seconds_total", "freehold_queued_pages"):
        assert f'{name}{{kind="backup"' in metrics
    report = httpx.get(f"{url}/debug/memory").json()["tiers"]
    assert report["transfers"]["backup"]["ended"] > 0
    code, said = run("inspect", url)
    assert (code, "Host memory" in said, "backup" in said) == (0, True, True), said


def test_without_a_host_tier_there_is_nothing_to_attach_to_or_to_save_to():
    with running_server("--num-pages", "60") as url:
        httpx.post(f"{url}/v1/sessions", json={"session_id": "s"})
        for method, path in (("PUT", BACKEND), ("POST", "/v1/sessions/s/save")):
            body = {"hicache_storage_backend": "file"} if method == "PUT" else None
            answer = httpx.request(method, f"{url}{path}", json=body)
            assert answer.status_code == 400
            assert "--enable-hierarchical-cache" in answer.json()["error"]["message"]
        restored = httpx.post(f"{url}/v1/sessions/s/restore").json()
        assert (restored["tokens"], restored["computed_tokens"]) == (0, 0)
        assert "--kv-events-config" in httpx.get(f"{url}/v1/cache/events").json()["error"]["message"]
