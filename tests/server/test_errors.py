"""Bad bodies: the message names the field and never quotes the whole body."""

import pytest
from starlette.testclient import TestClient

from freehold.ipc.async_engine import AsyncEngine
from freehold.server.app import create_app
from freehold.server.errors import SHOWN_MAX
from freehold.server.served_models import ServedModels

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client():
    with TestClient(create_app(AsyncEngine(), ServedModels(("m",)))) as client:
        yield client


@pytest.mark.parametrize(("content", "headers", "said"), [
    (b"", {}, "the body is missing: send a JSON object"),
    (b"null", JSON, "the body is missing: send a JSON object"),
    (b'{"prompt": "a"}', {"content-type": "text/plain"}, "send it with the header 'Content-Type: application/json'"),
    (b"prompt=a", {"content-type": "application/x-www-form-urlencoded"}, "'Content-Type: application/json'"),
    (b'["a", "b"]', JSON, "the body must be a JSON object, not a list"),
    (b'"text"', JSON, 'the body must be a JSON object, not "text"'),
    (b'{"prompt": ', JSON, "the body is not valid JSON"),
])  # fmt: skip
def test_a_body_that_is_no_object(client, content, headers, said):
    answer = client.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert "b'" not in answer.text


@pytest.mark.parametrize(("body", "field", "said"), [
    ({}, "prompt", "prompt: is required"),
    ({"prompt": {"a": ["secret"] * 100}}, "prompt", "got an object"),
    ({"prompt": "a", "max_tokens": "secret" * 100}, "max_tokens", "..."),
    ({"prompt": "a", "logit_bias": ["secret"]}, "logit_bias", "got a list"),
    ({"prompt": "a", "stop": {"secret": 1}}, "stop", "got an object"),
    ({"prompt": "a", "stream_options": {"include_usage": "secret"}}, "stream_options", "stream_options.include_usage"),
])  # fmt: skip
def test_a_wrong_field(client, body, field, said):
    answer = client.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(field)
    assert said in error["message"]
    assert error["message"].count("secret") <= SHOWN_MAX // 6 + 1
