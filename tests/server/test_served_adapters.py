"""Adapters over HTTP: chosen as a model, loaded and unloaded while the server runs, kept when the engine restarts."""

import asyncio
import json
from pathlib import Path

import httpx
import openai
import pytest
from processes import restart_engine
from random_adapters import save_random_adapter

from freehold import LLM, SamplingParams
from freehold.server.child import running_server

PROMPT = "Adapters change what a model says about the sea, the mountains and the weather of tomorrow."
GREEDY = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two adapters of random numbers."""
    return [save_random_adapter(tmp_path_factory.mktemp("adapter"), seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def url(folders):
    flags = ("--lora-modules", f"first={folders[0]}", "--audit-interval", "1", "--max-loras", "2")
    with running_server(*flags) as url:
        yield url


@pytest.fixture(scope="module")
def expected(folders):
    """What each says, without a server."""
    modules = tuple(f"{name}={folder}" for name, folder in zip(("first", "second"), folders, strict=True))
    with LLM(lora_modules=modules) as llm:
        params = SamplingParams(temperature=0, max_tokens=20)
        found = {name: llm.generate([PROMPT], params, adapter=name)[0].text for name in (None, "first", "second")}
    assert len(set(found.values())) == 3
    return found


def said(url: str, model: str | None = None, **fields) -> str:
    answer = httpx.post(f"{url}/v1/completions", json={**GREEDY, "model": model, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_an_adapter_is_chosen_as_the_model(url, expected):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    cards = {card.id: card for card in client.models.list()}
    base = next(name for name in cards if name != "first")
    assert cards["first"].parent == base
    assert cards[base].parent is None
    answer = client.completions.create(**GREEDY, model="first")
    assert (answer.model, answer.choices[0].text) == ("first", expected["first"])
    assert said(url, base) == said(url) == expected[None]
    assert said(url, lora_path="first") == expected["first"]
    params = {"max_new_tokens": 20, "temperature": 0}
    native = {"text": PROMPT, "sampling_params": params}
    answers = [httpx.post(f"{url}/generate", json={**native, "lora_path": name}, timeout=60) for name in ("", "first")]
    assert [answer.json()["text"] for answer in answers] == [expected[None], expected["first"]]
    for path, fields in (("/v1/completions", GREEDY), ("/generate", native)):
        refused = httpx.post(f"{url}{path}", json={**fields, "lora_path": "nobody"}, timeout=60)
        assert refused.status_code == 404
        assert "nobody" in refused.text
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**GREEDY, model="nobody")


def test_every_route_takes_an_adapter(url):
    chat = {"messages": [{"role": "user", "content": "Tell me about rivers and lakes, and how they meet the sea."}]}
    bodies = {
        "/v1/chat/completions": {**chat, "max_tokens": 12},
        "/v1/messages": {**chat, "max_tokens": 12},
        "/v1/responses": {"input": chat["messages"][0]["content"], "max_output_tokens": 16},
    }
    for path, body in bodies.items():
        texts = []
        for name in ("first", "SmolLM2-135M-Instruct", "first"):
            answer = httpx.post(f"{url}{path}", json={**body, "temperature": 0, "model": name}, timeout=60).json()
            assert answer["model"] == name
            said = answer.get("choices") or answer.get("content") or answer["output"][0]["content"]
            texts.append(json.dumps(said))
        assert texts[0] == texts[2] != texts[1], path


def test_turns_of_a_session_go_on_with_its_adapter(url):
    session = httpx.post(f"{url}/v1/sessions", json={}).json()["id"]
    whole, given = "", [PROMPT, " And then,", " In the end,"]
    for text in given:
        whole += text + said(url, "first", prompt=text, session_id=session)
    card = httpx.get(f"{url}/v1/sessions/{session}").json()
    assert card["cached"]["tokens"] >= card["tokens"] - 1
    assert whole.endswith(said(url, "first", prompt=whole.rpartition(given[-1])[0] + given[-1]))
    httpx.delete(f"{url}/v1/sessions/{session}")


def test_adapters_come_and_go_while_the_server_runs(url, folders, expected):
    def post(path: str, **body) -> httpx.Response:
        return httpx.post(f"{url}{path}", json=body, timeout=60)

    assert post("/v1/load_lora_adapter", lora_name="first", lora_path=folders[1]).status_code == 400
    for body in ({"lora_name": "second", "lora_path": "/nowhere"}, {"lora_name": "a=b", "lora_path": folders[1]},
                 {"lora_name": "", "lora_path": folders[1]}):  # fmt: skip
        assert post("/v1/load_lora_adapter", **body).status_code == 400
    loaded = post("/v1/load_lora_adapter", lora_name="second", lora_path=folders[1])
    assert set(loaded.json()["loaded_adapters"]) == {"first", "second"}
    assert post("/load_lora_adapter", lora_name="third", lora_path=folders[1]).status_code == 400, "two are the limit"
    assert [said(url, name) for name in ("second", "first", None)] == [
        expected["second"], expected["first"], expected[None]
    ]  # fmt: skip
    lookup = {"prompt": PROMPT, "lora_path": "second"}
    assert httpx.post(f"{url}/v1/cache/lookup", json=lookup).json()["cached_tokens"]["device"] >= 16
    assert post("/unload_lora_adapter", lora_name="second").status_code == 200
    assert post("/v1/unload_lora_adapter", lora_name="second").status_code == 404
    assert httpx.post(f"{url}/v1/completions", json={**GREEDY, "model": "second"}).status_code == 404


def test_an_engine_that_is_started_again_has_the_adapters_that_were_loaded(url, folders, expected):
    body = {"lora_name": "second", "lora_path": folders[1]}
    assert httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60).status_code == 200
    restart_engine(url)
    assert [said(url, name) for name in ("first", "second")] == [expected["first"], expected["second"]]


def test_an_engine_that_is_started_again_leaves_out_an_adapter_that_is_gone(url, folders, expected):
    folder = Path(folders[1])
    aside = folder.rename(folder.with_name("aside"))
    restart_engine(url)
    assert said(url, "first") == expected["first"]
    assert httpx.post(f"{url}/v1/completions", json={**GREEDY, "model": "second"}).status_code == 404
    aside.rename(folder)
    body = {"lora_name": "second", "lora_path": str(folder)}
    assert httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60).status_code == 200
    assert said(url, "second") == expected["second"]


def test_requests_of_several_adapters_share_steps(url, expected):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            names = ["first", "", "second"] * 4
            answers = await asyncio.gather(*(client.completions.create(**GREEDY, model=name) for name in names))
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask()) == [expected["first"], expected[None], expected["second"]] * 4
