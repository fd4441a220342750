"""What clients may say about the cache: OpenAI's words, Anthropic's and ours; and what operators pin."""

from urllib.parse import quote

import anthropic
import httpx
import openai
import pytest

from freehold.server.child import running_server

RULES = "You are a careful assistant who answers in one short line and never guesses. " * 4


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none")


def chat(client, messages, **options):
    return client.chat.completions.create(model="m", max_tokens=2, temperature=0, messages=messages, **options)


def story(url, answer) -> dict:
    return httpx.get(f"{url}/debug/requests/{answer.id}").json()


def user(text: str) -> list[dict]:
    return [{"role": "system", "content": RULES}, {"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("options", "priority", "ttl"),
    [
        ({"prompt_cache_key": "agent-7"}, 10, 300),
        ({"prompt_cache_options": {"ttl": "30m"}}, 50, 1800),
        ({"prompt_cache_retention": "24h"}, 50, 86400),
        ({"prompt_cache_retention": "in_memory"}, 50, 300),
        ({"extra_body": {"retention": {"priority": 77, "ttl": 9}}}, 77, 9),
        ({"extra_body": {"retention": {"next": "resume", "ttl": 60}}}, 80, 60),
        ({"extra_body": {"retention": {"next": "done"}}}, 0, 300),
        ({"prompt_cache_options": {"mode": "explicit"}}, None, None),
        ({}, None, None),
    ],
)
def test_every_way_to_say_it_is_one_record(url, client, options, priority, ttl):
    answer = chat(client, user("What is the time?"), **options)
    kept = story(url, answer)
    if priority is None:
        assert kept["retention"] is None
        return
    assert (kept["retention"]["priority"], kept["retention"]["ttl"]) == (priority, ttl)
    assert answer.usage.prompt_tokens_details.retained_tokens == kept["retained_tokens"]
    if priority:
        assert 0 < kept["retained_tokens"] <= answer.usage.prompt_tokens


def test_an_explicit_breakpoint_keeps_what_comes_before_it(url, client):
    part = {"type": "text", "text": RULES, "prompt_cache_breakpoint": {"mode": "explicit"}}
    messages = [{"role": "system", "content": [part]}, {"role": "user", "content": "One question. " * 30}]
    answer = chat(client, messages, prompt_cache_options={"mode": "explicit", "ttl": "30m"})
    end = story(url, answer)["retention"]["end"]
    alone = {"messages": [{"role": "system", "content": RULES}], "add_generation_prompt": False}
    system = httpx.post(f"{url}/tokenize", json=alone).json()["count"]
    assert system - 3 <= end <= system
    assert answer.usage.prompt_tokens > end + 50


@pytest.mark.parametrize("mark", ["system", "message"])
def test_anthropic_cache_control(url, mark):
    control = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [{"type": "text", "text": RULES + mark, **(control if mark == "system" else {})}]
    content = [{"type": "text", "text": "What now?", **(control if mark == "message" else {})}]
    client = anthropic.Anthropic(base_url=url, api_key="none")
    ask = {"model": "m", "max_tokens": 2, "system": system, "messages": [{"role": "user", "content": content}]}
    answer = client.messages.create(**ask)
    kept = story(url, answer)
    assert kept["retention"]["ttl"] == 3600
    assert kept["retention"]["end"] <= kept["prompt_tokens"]
    assert answer.usage.cache_creation_input_tokens > 0
    assert client.messages.create(**ask).usage.cache_read_input_tokens >= kept["retained_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"retention": {"priority": 0}}, "retention"),
        ({"retention": {"ttl": -1}}, "retention"),
        ({"retention": {"nonsense": 1}}, "retention"),
        ({"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_retention": "9999d"}, "prompt_cache_retention"),
    ],
)
def test_hints_that_make_no_sense_are_refused(url, body, field):
    answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": user("Hi"), **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_usage_names_the_tier(url, client):
    chat(client, user("Again?"))
    details = chat(client, user("Again?")).usage.prompt_tokens_details
    assert details.cached_tokens_by_tier == {"device": details.cached_tokens}
    assert details.cached_tokens > 0


def test_pins(url):
    for pin in httpx.get(f"{url}/v1/cache/pins").json()["data"]:
        httpx.delete(f"{url}/v1/cache/pins/{quote(pin['id'], safe='')}")
    wanted = {"prompt": "A long preamble that an operator wants kept. " * 12, "id": "preamble"}
    made = httpx.post(f"{url}/v1/cache/pins", json=wanted, timeout=60).json()
    assert made["kept_tokens"] == made["asked_tokens"] // 16 * 16
    assert made["pages"]["pinned"] == made["kept_tokens"] // 16
    assert httpx.post(f"{url}/v1/cache/pins", json=wanted, timeout=60).status_code == 409, "the name is in use"
    listed = httpx.get(f"{url}/v1/cache/pins").json()
    assert [pin["id"] for pin in listed["data"]] == ["preamble"]
    httpx.post(f"{url}/flush_cache", params={"timeout": 10})
    found = httpx.post(f"{url}/v1/cache/lookup", json={"prompt": wanted["prompt"]}).json()
    assert found["cached_tokens"]["device"] >= made["kept_tokens"] - 16
    whole = httpx.post(f"{url}/v1/cache/pins", json={"token_ids": [9] * 2000, "ttl": 60}, timeout=60).json()
    assert whole["kept_tokens"] < 2000, "the budget is a quarter of 400 pages"
    assert whole["pages"]["pinned"] == whole["pages"]["budget"] == 100
    for name in ("preamble", whole["id"]):
        assert httpx.delete(f"{url}/v1/cache/pins/{name}").json()["deleted"]
    assert httpx.delete(f"{url}/v1/cache/pins/preamble").status_code == 404
    httpx.post(f"{url}/flush_cache", params={"timeout": 10})
    pages = httpx.get(f"{url}/debug/memory").json()["pages"]
    assert pages["free"] == pages["capacity"]


@pytest.fixture(scope="module")
def guarded():
    keys = ("--api-key", "ann", "--api-key", "bob", "--admin-api-key", "root")
    with running_server(*keys, "--num-pages", "100", "--strict-audit") as url:
        yield url


def test_sessions_of_others_are_as_if_they_were_not(guarded):
    def call(key, method, path, **body):
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, f"{guarded}{path}", json=body or None, headers=headers, timeout=60)

    assert call("ann", "POST", "/v1/sessions", session_id="hers").status_code == 200
    turn = {"prompt": "Hello", "max_tokens": 3, "session_id": "hers"}
    assert call("ann", "POST", "/v1/completions", **turn).status_code == 200
    for key, sees in (("ann", True), ("bob", False), ("root", True)):
        assert call(key, "GET", "/v1/sessions/hers").status_code == (200 if sees else 404)
        assert [card["id"] for card in call(key, "GET", "/v1/sessions").json()["data"]] == (["hers"] if sees else [])
    for method, path, body in (
        ("POST", "/v1/completions", turn),
        ("POST", "/v1/sessions/hers/fork", {"session_id": "mine"}),
        ("POST", "/v1/sessions/hers/rewind", {"to": 0}),
        ("DELETE", "/v1/sessions/hers", {}),
    ):
        assert call("bob", method, path, **body).status_code == 404
    native = {"text": "Hi", "session_params": {"id": "hers"}}
    assert "does not exist" in call("bob", "POST", "/generate", **native).json()["error"]["message"]
    assert call("bob", "POST", "/close_session", session_id="hers").status_code == 200
    assert call("ann", "GET", "/v1/sessions/hers").status_code == 200, "it was not closed"
    assert call("bob", "GET", "/v1/cache/pins").status_code == 403
