"""Constrained output over HTTP, on every route and with the real client."""

import json
import time

import httpx
import pytest
from jsonschema import validate
from pydantic import BaseModel

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "legs": {"type": "integer", "maximum": 99}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
ASKED = [{"role": "user", "content": "Describe a cat as JSON, with its name and its number of legs."}]


class Animal(BaseModel):
    name: str
    legs: int


def test_the_client_parses_what_it_asked_for(client):
    answer = client.chat.completions.parse(
        model="SmolLM2-135M-Instruct", messages=ASKED, response_format=Animal, temperature=0, max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_says_the_same(client):
    options = {
        "model": "SmolLM2-135M-Instruct", "messages": ASKED, "temperature": 0, "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}},
    }  # fmt: skip
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    validate(json.loads(whole), SCHEMA)


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object"}, "max_tokens": 200},
        {"json_schema": SCHEMA},
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_json_on_both_routes(server, path, form):
    prompt = {"messages": ASKED} if "chat" in path else {"prompt": "A cat as JSON: "}
    answer = httpx.post(f"{server}{path}", json={"temperature": 0, "max_tokens": 60, **prompt, **form}, timeout=60)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)
    assert text.lstrip().startswith("{")


def test_the_native_route(server):
    for form, allowed in (
        ({"regex": "(Paris|London)"}, {"Paris", "London"}),
        ({"ebnf": 'root ::= "yes" | "no"'}, {"yes", "no"}),
        ({"json_schema": '{"enum": ["a", "b"]}'}, {'"a"', '"b"'}),
    ):
        sampling = {"temperature": 0, "max_new_tokens": 16, **form}
        answer = httpx.post(
            f"{server}/generate", json={"text": "The answer is", "sampling_params": sampling}, timeout=60
        )
        assert answer.json()["text"] in allowed
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize(
    ("form", "param", "words"),
    [
        ({"regex": "(?=x)"}, "regex", "look-ahead"),
        ({"regex": "((a{100}){100}){100}"}, "regex", "too many"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema", "uniqueItems"),
        ({"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}}, "json_schema", "minLength"),
        ({"ebnf": "root ::= x"}, "ebnf", "there is no rule 'x'"),
        ({"regex": "a", "guided_choice": ["b"]}, "guided_choice", "one form"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
         "response_format.json_schema.schema", "not"),
    ],
)  # fmt: skip
def test_what_can_not_be_followed_is_refused_and_leaves_no_trace(server, form, param, words):
    name = httpx.post(f"{server}/v1/sessions").json()["id"]
    body = {"messages": ASKED, "max_tokens": 4, "session_id": name, **form}
    for streams in (False, True):
        refused = httpx.post(f"{server}/v1/chat/completions", json={**body, "stream": streams}, timeout=60)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param
        assert words in refused.json()["error"]["message"]
    session = httpx.get(f"{server}/v1/sessions/{name}").json()
    assert (session["tokens"], session["active"]) == (0, False)
    httpx.delete(f"{server}/v1/sessions/{name}")


def test_failures_are_counted(server):
    def failures():
        lines = httpx.get(f"{server}/metrics").text.splitlines()
        (line,) = [one for one in lines if one.startswith("freehold_grammar_failures_total") and '"compile"' in one]
        return float(line.rpartition(" ")[2])

    time.sleep(1.5)  # counts come once a second
    before = failures()
    httpx.post(f"{server}/v1/completions", json={"prompt": "a", "max_tokens": 1, "regex": "a(?=b)"}, timeout=60)
    end = time.monotonic() + 10
    while failures() != before + 1:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_session_has_a_form_for_each_turn(server):
    name = httpx.post(f"{server}/v1/sessions").json()["id"]

    def turn(text, **form):
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "session_id": name, "temperature": 0, "max_tokens": 40, **form}
        answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    assert turn("A cat, please.", json_schema={"enum": ["cat", "dog"]}) in ('"cat"', '"dog"')
    assert turn("A number, please.", regex="[0-9]{3}").isdigit()
    assert turn("Now say what you like.")
    httpx.delete(f"{server}/v1/sessions/{name}")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_nothing(client, server, mode):
    options = {
        "model": "SmolLM2-135M-Instruct", "messages": ASKED, "temperature": 0.8, "seed": 5, "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}},
    }  # fmt: skip
    whole = client.chat.completions.create(**options).choices[0].message.content
    said = ""
    for i, chunk in enumerate(client.chat.completions.create(**options, stream=True)):
        said += chunk.choices[0].delta.content or ""
        if i in (3, 6):
            assert httpx.post(f"{server}/pause_generation", json={"mode": mode}, timeout=60).status_code == 200
            assert httpx.post(f"{server}/continue_generation", timeout=60).status_code == 200
    assert said == whole


def test_turns_of_sessions_and_of_their_forks_are_bound(client, server):
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}}
    options = {"model": "SmolLM2-135M-Instruct", "temperature": 0, "max_tokens": 60, **form}
    again = [{"role": "user", "content": "And a bird."}]
    session = httpx.post(f"{server}/v1/sessions", json={}).json()["id"]
    first = client.chat.completions.create(**options, messages=ASKED, extra_body={"session_id": session})
    fork = httpx.post(f"{server}/v1/sessions/{session}/fork", json={}).json()["id"]
    answers = [
        client.chat.completions.create(**options, messages=again, extra_body={"session_id": name}).choices[0].message
        for name in (session, fork)
    ]
    said = [{"role": "assistant", "content": first.choices[0].message.content}]
    cold = client.chat.completions.create(**options, messages=[*ASKED, *said, *again]).choices[0].message
    for name in (session, fork):
        httpx.delete(f"{server}/v1/sessions/{name}")
    assert answers[0].content == answers[1].content == cold.content
    validate(json.loads(cold.content), SCHEMA)
