"""Requests from the fields of a scenario."""

from __future__ import annotations

from typing import Any

import numpy as np

from freehold.contract.sampling_params import SamplingParams
from freehold.memory import Retention
from freehold.scheduler.request import Request
from freehold.simulation.compiling import constraint_of
from freehold.simulation.scenario import ADAPTERS


def request_of(fields: dict[str, Any], prompt: list[int]) -> Request:
    """Return the request of a SUBMIT with arguments `fields`. `prompt` is the whole prompt, history included."""
    names = ("max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids")
    scored = {name: fields.get(name) for name in ("logprobs", "prompt_logprobs_start", "pooling")}
    regexes = tuple(fields.get("stop_regex", ()))
    form = fields.get("form")
    constraint = None if form is None else constraint_of(form)
    asked = {name: fields[name] for name in names}
    params = SamplingParams(temperature=0, constraint=constraint, stop_regex=regexes, **scored, **asked)
    return Request(
        id=fields["id"],
        prompt=np.array(prompt, np.int32),
        params=params,
        namespace=fields["namespace"],
        client=fields.get("client", ""),
        priority=fields["priority"],
        timeout=fields["timeout"],
        session=fields["session"],
        retention=Retention(*fields["retention"]) if fields.get("retention") else None,
        adapter=ADAPTERS.get(fields.get("adapter", "")),
    )
