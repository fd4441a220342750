"""Numbers of bodies at their extremes, over HTTP: an answer or an error that names the field, and the engine goes on."""

from typing import get_args

import httpx
import orjson
import pytest
from processes import engine_of
from pydantic import BaseModel

from freehold.server.anthropic.schema import MessagesBody
from freehold.server.native.schema import GenerateBody, NativeSampling
from freehold.server.openai.schema import ChatBody, CompletionBody, EmbeddingBody
from freehold.server.responses.schema import ResponsesBody

EXTREMES = (-(2**63), -(2**31), 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 5e-324, 1e308)
SAID = [{"role": "user", "content": "hi"}]
SHORT = {"stop_regex": "(?s)."}  # where nothing else limits the output
BODIES = [
    ("/generate", GenerateBody, {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}}, ()),
    ("/generate", NativeSampling, {"input_ids": [5, 6, 7], "sampling_params": SHORT}, ("sampling_params",)),
    ("/v1/completions", CompletionBody, {"prompt": "hi", "max_tokens": 2, **SHORT}, ()),
    ("/v1/chat/completions", ChatBody, {"messages": SAID, "max_completion_tokens": 2, **SHORT}, ()),
    ("/v1/embeddings", EmbeddingBody, {"input": "hi"}, ()),
    ("/v1/responses", ResponsesBody, {"input": "hi", "max_output_tokens": 2}, ()),
    ("/v1/messages", MessagesBody, {"model": "m", "max_tokens": 2, "messages": SAID}, ()),
]


def named(annotation):
    """All types that an annotation names."""
    return {annotation}.union(*map(named, get_args(annotation)))


def fields(body, where=()):
    """The path of each field of a body that takes a number, alone or in a list, and whether it is in one."""
    for name, field in body.model_fields.items():
        types = named(field.annotation)
        for nested in (one for one in types if isinstance(one, type) and issubclass(one, BaseModel)):
            if name in ("retention", "session_params"):
                yield from fields(nested, (*where, name))
        if name not in ("input_ids", "prompt", "input") and types & {int, float}:
            yield (*where, name), any(str(one).startswith("list[int") for one in types) and int not in field_types(field)


def field_types(field):
    return {one for one in get_args(field.annotation) if isinstance(one, type)}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("path", "schema", "body", "under"), BODIES, ids=lambda value: getattr(value, "__name__", None))
def test_no_number_of_a_body_ends_the_engine_or_is_an_internal_error(url, path, schema, body, under):
    engine, tried = engine_of(url), 0
    with httpx.Client(base_url=url, timeout=60) as client:
        for where, is_list in fields(schema, under):
            for value in EXTREMES:
                sent = orjson.loads(orjson.dumps(body))
                inner = sent
                for name in where[:-1]:
                    inner = inner.setdefault(name, {})
                inner[where[-1]] = {"5": value} if where[-1] == "logit_bias" else [value] if is_list else value
                text = repr(sent).replace("'", '"').replace("True", "true")
                answer = client.post(path, content=text, headers={"Content-Type": "application/json"})
                tried += 1
                is_meant = answer.status_code in (200, 400) or (answer.status_code == 503 and where[-1] == "timeout")
                assert is_meant, f"{path} {where} {value}: {answer.status_code} {answer.text}"
    assert tried > 8
    assert engine_of(url) == engine
