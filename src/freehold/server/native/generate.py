"""POST /generate, field-compatible with SGLang's."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response

from freehold.contract.arrays import Int32
from freehold.contract.errors import FreeholdError, InvalidParameter
from freehold.contract.step import TokenLogprobs
from freehold.ipc.async_engine import AsyncEngine
from freehold.ipc.protocol import Options
from freehold.scheduler.request import check_token_ids
from freehold.server.access.clients import Client, client_of
from freehold.server.native.schema import GenerateBody, NativeSampling, Probe
from freehold.server.native.sessions import NativeSessions, room
from freehold.server.requests.job import Generator, Job, Output
from freehold.server.requests.response import respond
from freehold.server.router import router
from freehold.server.served_models import ServedModels
from freehold.server.sessions.table import Session, SessionTable
from freehold.server.sessions.turns import closed_on_failure
from freehold.text.tokenizer import Tokenizer


def native_routes(engine: AsyncEngine, generator: Generator, sessions: SessionTable, models: ServedModels) -> APIRouter:
    routes = router()
    natives = NativeSessions(engine, sessions)

    @routes.put("/generate", response_model=None, include_in_schema=False)
    @routes.post("/generate", response_model=None)
    async def generate(body: GenerateBody, request: Request) -> Response | Any:
        adapter = models.choose(None, body.lora_path).adapter
        samples, is_list = await _samples(body, client_of(request), adapter, engine, natives, generator)
        answer = _Answer(generator, engine.tokenizer, body, samples, is_list)
        return await respond(request, answer, body.stream, samples[0].job.turn)

    return routes


@dataclass
class _Sample:
    """One output of a prompt, as received so far."""

    job: Job
    sampling: NativeSampling
    probe: Probe | None
    output: Output = field(default_factory=Output)
    failure: FreeholdError | None = None  # why a stream ended early
    started: float = field(default_factory=time.monotonic)


async def _samples(
    body: GenerateBody,
    client: Client,
    adapter: str,
    engine: AsyncEngine,
    natives: NativeSessions,
    generator: Generator,
) -> tuple[list[_Sample], bool]:
    """Validate everything before any change. Return the outputs, prompt-major, and whether to answer with a list.
    Raises BadRequest and what sessions raise."""
    prompts, is_list = body.prompts()
    count = len(prompts)
    samplings, probes = body.sampling(count), body.probes(count, engine.info.vocab_size)
    params = [sampling.params(probe) for sampling, probe in zip(samplings, probes, strict=True)]
    generator.check_outputs(count, params[0].n, "text" if body.text is not None else "input_ids")
    rids = _rids(body, count, engine)
    turn = natives.turn(body, client, rids[0], count * params[0].n)
    with closed_on_failure(turn):
        ids = [await _token_ids(prompt, engine) for prompt in prompts]
        for tokens, probe in zip(ids, probes, strict=True):
            _check_prompt(tokens, probe, turn is not None, engine)
        if turn is not None and body.session_params is not None:
            await natives.begin(turn, body.session_params, ids[0])
            turn.adapter = adapter
            ids = [turn.tokens]
        options = _options(body, None if turn is None else turn.session, client, adapter)
        samples: list[_Sample] = []
        for rid, tokens, sampling, one, probe in zip(rids, ids, samplings, params, probes, strict=True):
            fitted = sampling.fitted(one, room(len(tokens), engine))
            fitted = fitted if turn is None else turn.fitted(fitted)
            skip = sampling.skip_special_tokens is not False
            job = Job(rid, [tokens], fitted, options, "input_ids", client, skip, turn)
            samples += [_Sample(job, sampling, probe) for _ in range(fitted.n)]
        return samples, is_list or len(samples) > 1


def _options(body: GenerateBody, session: Session | None, client: Client, adapter: str) -> Options:
    retention = None if body.retention is None else body.retention.retention()
    salt, name = client.namespace(body.cache_salt), None
    if session is not None:
        salt = session.settings.namespace
        name = None if session.settings.branching else session.key
    return Options(body.priority or 0, salt, body.timeout, name, retention, adapter=adapter)


def _check_prompt(tokens: Int32, probe: Probe | None, is_turn: bool, engine: AsyncEngine) -> None:
    if not is_turn:
        if not len(tokens):
            raise InvalidParameter("input_ids", "must not be empty")
        room(len(tokens), engine)
    if probe is not None and probe.start > len(tokens):
        raise InvalidParameter("logprob_start_len", f"is {probe.start}, the prompt has {len(tokens)} tokens")


class _Answer:
    """All outputs of one call."""

    def __init__(
        self, generator: Generator, tokenizer: Tokenizer, body: GenerateBody, samples: list[_Sample], is_list: bool
    ):
        self._generator = generator
        self._tokenizer = tokenizer
        self._body = body
        self._samples = samples
        self._is_list = is_list

    async def _news(self) -> AsyncGenerator[int]:
        """Run all jobs at once and yield an output's index each time it has news."""
        news: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        samples = self._samples[0].job.params.n
        jobs = [sample.job for sample in self._samples[::samples]]

        async def run(first: int, job: Job) -> None:
            try:
                async with aclosing(self._generator.deltas(job)) as stream:
                    async for delta in stream:
                        self._samples[first + delta.index].output.add(delta)
                        news.put_nowait(first + delta.index)
                news.put_nowait(None)
            except Exception as error:
                news.put_nowait(error)

        tasks = [asyncio.create_task(run(number * samples, job)) for number, job in enumerate(jobs)]
        try:
            left = len(tasks)
            while left:
                item = await news.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def whole(self) -> Any:
        async with aclosing(self._news()) as news:
            async for _ in news:
                pass
        answers = [self._one(sample) for sample in self._samples]
        return answers if self._is_list else answers[0]

    async def stream(self) -> AsyncGenerator[dict[str, Any]]:
        """Stream events. An error before the first event is raised; a later one becomes a finish reason."""
        has_begun, ended = False, set[int]()
        try:
            async with aclosing(self._news()) as news:
                async for at in news:
                    if at in ended:
                        continue  # a previous event already included this news
                    has_begun = True
                    if self._samples[at].output.ended is not None:
                        ended.add(at)
                    yield self._event(at)
        except FreeholdError as error:
            if not has_begun:
                raise
            for at, sample in enumerate(self._samples):
                if sample.output.ended is None or not sample.output.ended.is_complete:
                    sample.failure = error
                    yield self._event(at)

    def _event(self, at: int) -> dict[str, Any]:
        return {**self._one(self._samples[at]), **({"index": at} if self._is_list else {})}

    def _one(self, sample: _Sample) -> dict[str, Any]:
        output, prompt = sample.output, sample.job.prompts[0]
        nothing = sample.sampling.max_new_tokens == 0
        tokens = [] if nothing else list(output.tokens)
        ended = output.ended
        meta: dict[str, Any] = {
            "id": sample.job.id,
            "finish_reason": _finish_reason(sample, len(tokens), nothing),
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": output.cached_tokens if ended is None else ended.cached_tokens,
            "reasoning_tokens": 0,
            "weight_version": "default",
            "num_retractions": 0 if ended is None else ended.retractions,
            "e2e_latency": time.monotonic() - sample.started,
        }
        if sample.probe is not None:
            meta.update(self._logprobs(sample, sample.probe))
        return {"text": "" if nothing else output.text, "output_ids": tokens, "meta_info": meta}

    def _logprobs(self, sample: _Sample, probe: Probe) -> dict[str, Any]:
        output, prompt = sample.output, sample.job.prompts[0]
        scored = list(output.prompt_logprobs)
        if 0 <= probe.start < len(prompt):
            # The first token has no log-probability: nothing precedes it, or the prefix was not requested.
            scored.insert(0, TokenLogprobs(int(prompt[probe.start]), math.nan, []))
        found: dict[str, Any] = {"output_token_logprobs_length": len(output.logprobs)}
        for side, entries in (("input", scored), ("output", output.logprobs)):
            found[f"{side}_token_logprobs"] = [self._entry(one.token, one.logprob) for one in entries]
            if probe.top:
                found[f"{side}_top_logprobs"] = [self._row(one, one.top) for one in entries]
            if probe.token_ids:
                found[f"{side}_token_ids_logprobs"] = [self._row(one, one.asked) for one in entries]
        return found

    def _row(self, one: TokenLogprobs, entries: list[tuple[int, float]]) -> list[Any] | None:
        return None if math.isnan(one.logprob) else [self._entry(*entry) for entry in entries]

    def _entry(self, token: int, logprob: float) -> list[Any]:
        text = self._tokenizer.decode([token], False) if self._body.return_text_in_logprobs else None
        return [None if math.isnan(logprob) else logprob, token, text]


def _finish_reason(sample: _Sample, tokens: int, nothing: bool) -> dict[str, Any] | None:
    ended, failure = sample.output.ended, sample.failure
    if failure is not None:
        return {"type": "abort", "message": failure.message, "status_code": failure.status, "err_type": None}
    if ended is None:
        return None
    if ended.is_complete and (nothing or ended.kind == "length"):
        return {"type": "length", "length": tokens}
    if ended.kind == "stop":
        return {"type": "stop", "matched": ended.matched}
    return {"type": "abort", "message": ended.message, "status_code": None, "err_type": None}


def _rids(body: GenerateBody, count: int, engine: AsyncEngine) -> list[str]:
    """Return the request ids. A string for a batch becomes rid_0, rid_1, ... Raises InvalidParameter for one in
    flight."""
    if isinstance(body.rid, list):
        rids = body.each("rid", count, None)
    elif body.rid is not None:
        rids = [body.rid] if count == 1 else [f"{body.rid}_{i}" for i in range(count)]
    else:
        rids = [uuid.uuid4().hex for _ in range(count)]
    for i, rid in enumerate(rids):
        if rid in rids[:i] or engine.is_running(rid):
            raise InvalidParameter("rid", f"request id {rid} is already in flight")
    return rids


async def _token_ids(prompt: str | list[int], engine: AsyncEngine) -> Int32:
    if isinstance(prompt, str):
        return await engine.encode(prompt, True)
    try:
        return check_token_ids(prompt, engine.info.vocab_size)
    except InvalidParameter as error:
        raise InvalidParameter("input_ids", str(error)) from None
