"""Numbers of requests at their extremes: each is refused by name, or the request ends as it should."""

import math
from dataclasses import fields
from typing import get_args, get_type_hints

import msgspec
import numpy as np
import pytest

from freehold.config import EngineConfig
from freehold.contract.errors import BadRequest
from freehold.contract.sampling_params import SamplingParams
from freehold.ipc.protocol import Options
from freehold.memory import Retention
from freehold.scheduler.request import Request
from harness import Harness

EXTREMES = (-(2**63), -(2**31), 2**31, 2**63 - 1, 2**63, 2**64 - 1, 5e-324, 1e308, math.nan, math.inf)
VOCABULARY = 1000


def kinds(annotation) -> set[type]:
    """All types that an annotation names."""
    return {annotation}.union(*map(kinds, get_args(annotation)))


def cases():
    """Each numeric field with each value, in the shape that it has."""
    asked = {field.name for field in msgspec.structs.fields(Options)} | {"seed"}
    for record, names in ((SamplingParams, None), (Request, asked), (Retention, None)):
        hints = get_type_hints(record)
        for name in (field.name for field in fields(record) if names is None or field.name in names):
            if not kinds(hints[name]) & {int, float}:
                continue
            for value in EXTREMES:
                if name == "logit_bias":
                    yield record, name, {value: 1.0}
                    yield record, name, {1: value}
                else:
                    yield record, name, (value,) if name.endswith("_ids") else value


def ask(harness, record, name, value) -> Request:
    most = None if name == "min_tokens" else 5
    params = {
        "max_tokens": most,
        "ignore_eos": True,
        "logprobs": 1,
        **({name: value} if record is SamplingParams else {}),
    }
    given = {name: value} if record is Request else {}
    if record is Retention:
        given["retention"] = Retention(**{name: value})
    request = Request("odd", np.arange(1, 30, dtype=np.int32), SamplingParams(**params), **given)
    harness.scheduler.add(request)
    return request


def test_a_number_at_its_extreme_is_refused_by_name_or_the_request_ends_as_it_should():
    """The harness compares every end with a cold run and audits the memory; another request computes beside each."""
    found, now = list(cases()), 0.0
    assert {"top_k", "logit_bias", "priority", "timeout", "ttl", "end"} <= {name for _, name, _ in found}
    config = EngineConfig(page_size=4, num_pages=100, max_running_requests=4, schedule_policy="priority")
    harness = Harness(config, token_limit=64, clock=lambda: now, audit_every=10)
    for record, name, value in found:
        beside = harness.submit([7, 8, 9], SamplingParams(max_tokens=6, ignore_eos=True), name="beside")
        harness.step()
        request, refused = None, name
        try:
            request = ask(harness, record, name, value)
        except BadRequest as error:
            refused = error.field
        while harness.scheduler.has_work:
            now += 0.01
            harness.step()
        assert refused == name, f"{record.__name__}.{name} {value}: {refused} was refused"
        assert beside.finish.is_complete, f"{record.__name__}.{name} {value}: {beside.finish}"
        assert request is None or request.finish.error is None or name == "timeout", f"{name} {value}"


@pytest.mark.parametrize(
    ("record", "name", "value"),
    [
        (Request, "priority", 2**63),
        (Request, "priority", -(2**63)),
        (SamplingParams, "min_tokens", 2**63 - 1),
        (SamplingParams, "top_k", 2**63),
        (SamplingParams, "repetition_penalty", 1e-320),
        (SamplingParams, "logprob_token_ids", (VOCABULARY,)),
        (Retention, "ttl", 5e-324),
        (Retention, "end", 2**63),
    ],
)
def test_what_no_array_can_hold_is_refused_with_its_limit(record, name, value):
    harness = Harness(EngineConfig(page_size=4, num_pages=100, max_running_requests=4), token_limit=64)
    with pytest.raises(BadRequest, match=rf"^{name}: .*(must be|outside the vocabulary)"):
        ask(harness, record, name, value)
    assert not harness.scheduler.requests


def test_a_temperature_that_divides_no_logit_is_greedy():
    assert SamplingParams(temperature=5e-324).temperature == 0
