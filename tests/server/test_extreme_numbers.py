"""Numbers of bodies at their extremes, over HTTP: an answer or an error of the caller, and the engine goes on."""

import copy
import json
from typing import get_args

import httpx
import pytest
from processes import engine_of
from pydantic import BaseModel, ValidationError

from freehold.contract.whole import WHOLE_MAX
from freehold.server.anthropic.schema import MessagesBody
from freehold.server.native.schema import GenerateBody, NativeSampling, OpenSessionBody, SessionParams
from freehold.server.openai.schema import ChatBody, CompletionBody, EmbeddingBody, SessionBody
from freehold.server.requests.hints import RetentionBody
from freehold.server.responses.schema import ResponsesBody

EXTREMES = (-(2**63), -(2**31), 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 5e-324, 1e308)
SAID = [{"role": "user", "content": "hi"}]
BODIES = [
    ("/generate", GenerateBody, {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}, ()),
    (
        "/generate",
        NativeSampling,
        {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}},
        ("sampling_params",),
    ),
    ("/v1/completions", CompletionBody, {"prompt": "hi", "max_tokens": 2}, ()),
    ("/v1/chat/completions", ChatBody, {"messages": SAID, "max_completion_tokens": 2}, ()),
    ("/v1/embeddings", EmbeddingBody, {"input": "hi"}, ()),
    ("/v1/responses", ResponsesBody, {"input": "hi", "max_output_tokens": 2}, ()),
    ("/v1/messages", MessagesBody, {"model": "m", "max_tokens": 2, "messages": SAID}, ()),
]


def named(annotation):
    """All types that an annotation names."""
    return {annotation}.union(*map(named, get_args(annotation)))


def numbers(schema: type[BaseModel], where=()):
    """The path of each field that takes numbers, and whether in a list. Prompts are not numbers."""
    for name, field in schema.model_fields.items():
        types = named(field.annotation)
        for nested in types & {RetentionBody, SessionParams}:
            yield from numbers(nested, (*where, name))
        if types & {int, float} and name not in ("input_ids", "prompt", "input"):
            yield (*where, name), not {field.annotation, *get_args(field.annotation)} & {int, float}


def with_number(body, where, is_list, value):
    changed = copy.deepcopy(body)
    inner = changed
    for name in where[:-1]:
        inner = inner.setdefault(name, {})
    inner[where[-1]] = {"5": value} if where[-1] == "logit_bias" else [value] if is_list else value
    return json.dumps(changed)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("path", "schema", "body", "under"), BODIES, ids=lambda value: getattr(value, "__name__", ""))
def test_no_number_of_a_body_ends_the_engine_or_is_an_internal_error(url, path, schema, body, under):
    engine, found = engine_of(url), list(numbers(schema, under))
    assert found
    with httpx.Client(base_url=url, timeout=60, headers={"Content-Type": "application/json"}) as client:
        for where, is_list in found:
            for value in EXTREMES:
                if where[-1].startswith("max_") and 0 < value <= WHOLE_MAX:
                    continue  # as much as fits, which takes long
                answer = client.post(path, content=with_number(body, where, is_list, value))
                is_late = answer.status_code == 503 and where[-1] == "timeout"
                assert answer.status_code in (200, 400) or is_late, f"{where} {value}: {answer.text}"
    assert engine_of(url) == engine
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("body", [GenerateBody, OpenSessionBody, CompletionBody, SessionBody, ResponsesBody])
def test_no_time_is_without_end(body):
    """Those of sessions are stored, and the store takes what is no JSON for damage."""
    needed = {"capacity_of_str_len": 1, "prompt": "hi", "input": "hi"}
    assert body.model_validate({**needed, "timeout": "600"}).timeout == 600
    for number in ("inf", "nan", "1e999"):
        with pytest.raises(ValidationError, match="finite number"):
            body.model_validate({**needed, "timeout": number})
