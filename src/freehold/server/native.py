"""POST /generate, field-compatible with SGLang's."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from freehold.llm import check_token_ids
from freehold.sampling_params import InvalidParameter
from freehold.server.async_engine import AsyncEngine, Delta
from freehold.server.branches import BranchTree
from freehold.server.errors import ApiError
from freehold.server.generation import Generator, Job, encode, event_stream, unless_disconnected
from freehold.server.messages import Ended
from freehold.server.native_schema import GenerateBody, NativeSampling
from freehold.server.sessions import NoSuchSession, Session, SessionBusy, SessionTable, Turn
from freehold.step import TokenLogprobs
from freehold.text.tokenizer import Tokenizer


@dataclass
class _Output:
    """One output, as far as it has come."""

    rid: str
    job: Job
    sampling: NativeSampling
    branches: BranchTree | None
    started: float = field(default_factory=time.monotonic)
    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    ended: Ended | None = None
    cached_tokens: int = 0

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.cached_tokens = delta.cached_tokens
        self.ended = delta.ended or self.ended
        if self.branches is not None and self.ended is not None:
            if self.ended.kind in ("stop", "length"):
                self.branches.finish(self.rid, list(self.tokens))
            else:
                self.branches.abandon(self.rid)


@dataclass(frozen=True)
class _Server:
    """What all calls share: `active` are the request ids in flight, `trees` those of branching sessions."""

    engine: AsyncEngine
    sessions: SessionTable
    active: set[str] = field(default_factory=set[str])
    trees: dict[str, BranchTree] = field(default_factory=dict[str, BranchTree])


def native_routes(engine: AsyncEngine, generator: Generator, sessions: SessionTable) -> APIRouter:
    router = APIRouter()
    server = _Server(engine, sessions)

    @router.put("/generate", response_model=None, include_in_schema=False)
    @router.post("/generate", response_model=None)
    async def generate(body: GenerateBody, request: Request) -> Response | Any:
        batch = await _Batch.of(body, server)
        if body.stream:
            return await event_stream(batch.stream(generator))
        return await unless_disconnected(request, batch.whole(generator))

    return router


@dataclass
class _Batch:
    """All outputs of one call: prompt-major, samples of one prompt adjacent."""

    jobs: list[Job]
    outputs: list[_Output]
    is_list: bool
    body: GenerateBody
    server: _Server

    @property
    def tokenizer(self) -> Tokenizer:
        return self.server.engine.tokenizer

    @classmethod
    async def of(cls, body: GenerateBody, server: _Server) -> _Batch:
        """Validate everything before anything changes. Raises InvalidParameter, ApiError and what sessions
        raise."""
        prompts, is_list = body.prompts()
        samplings, logprobs = body.sampling(len(prompts)), body.logprob_counts(len(prompts))
        rids = _rids(body, len(prompts), server.active)
        session = _session_of(body, server.sessions, len(prompts))
        ids = [await _token_ids(prompt, server.engine) for prompt in prompts]
        limit = server.engine.info.max_model_len
        for tokens, sampling, count in zip(ids, samplings, logprobs, strict=True):
            sampling.sampling(count, _room(tokens, session, limit))
        turn, tree = None, None
        if session is not None:
            ids[0], turn, tree = _begin(body, server, session, rids[0], ids[0])
        salt = session.settings.namespace if session is not None else body.cache_salt or ""
        jobs: list[Job] = []
        outputs: list[_Output] = []
        try:
            for rid, tokens, sampling, count in zip(rids, ids, samplings, logprobs, strict=True):
                params = sampling.sampling(count, max(limit - len(tokens) - 1, 1))
                skip = sampling.skip_special_tokens is not False
                prompt = np.array(tokens, np.int32)
                job = Job(rid, [prompt], params, body.priority or 0, salt, skip, "input_ids", body.timeout, turn)
                jobs.append(job)
                outputs += [_Output(rid, job, sampling, tree) for _ in range(params.n)]
        except InvalidParameter:
            if turn is not None:
                turn.close()
            if tree is not None:
                tree.abandon(rids[0])
            raise
        server.active.update(rids)
        return cls(jobs, outputs, is_list or len(outputs) > 1, body, server)

    async def deltas(self, generator: Generator) -> AsyncGenerator[int]:
        """Run all jobs at once; the index of an output each time that one has news."""
        news: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        samples = self.jobs[0].params.n

        async def run(number: int, job: Job) -> None:
            try:
                async with aclosing(generator.deltas(job)) as stream:
                    async for delta in stream:
                        at = number * samples + delta.index
                        self.outputs[at].add(delta)
                        news.put_nowait(at)
                news.put_nowait(None)
            except Exception as error:
                news.put_nowait(error)

        tasks = [asyncio.create_task(run(number, job)) for number, job in enumerate(self.jobs)]
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
            self._close()

    def _close(self) -> None:
        for job, output in zip(self.jobs, self.outputs[:: self.jobs[0].params.n], strict=True):
            self.server.active.discard(job.id)
            if job.turn is not None:
                job.turn.close()
            if output.branches is not None:
                output.branches.abandon(output.rid)

    async def whole(self, generator: Generator) -> Any:
        async with aclosing(self.deltas(generator)) as news:
            async for _ in news:
                pass
        answers = [self._answer(output) for output in self.outputs]
        return answers if self.is_list else answers[0]

    async def stream(self, generator: Generator) -> AsyncGenerator[dict[str, Any]]:
        async with aclosing(self.deltas(generator)) as news:
            async for at in news:
                output = self.outputs[at]
                yield {**self._answer(output), **({"index": at} if self.is_list else {})}

    def _answer(self, output: _Output) -> dict[str, Any]:
        nothing = output.sampling.max_new_tokens == 0
        tokens = [] if nothing else output.tokens
        text = "" if nothing else self._text(output)
        ended, prompt = output.ended, len(output.job.prompts[0])
        meta: dict[str, Any] = {
            "id": output.rid,
            "finish_reason": None if ended is None else _finish_reason(ended, len(tokens), nothing),
            "prompt_tokens": prompt,
            "completion_tokens": len(tokens),
            "cached_tokens": output.cached_tokens if ended is None else ended.cached_tokens,
            "reasoning_tokens": 0,
            "weight_version": "default",
            "num_retractions": 0 if ended is None else ended.retractions,
            "e2e_latency": time.monotonic() - output.started,
        }
        if output.job.params.logprobs is not None:
            meta.update(self._logprobs(output))
        return {"text": text, "output_ids": list(tokens), "meta_info": meta}

    def _text(self, output: _Output) -> str:
        if output.sampling.no_stop_trim and output.ended is not None:
            return self.tokenizer.decode(output.tokens, skip_special_tokens=False)
        return output.text

    def _logprobs(self, output: _Output) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> list[Any]:
            shown = self.body.return_text_in_logprobs
            return [logprob, token, self.tokenizer.decode([token], False) if shown else None]

        found: dict[str, Any] = {
            "input_token_logprobs": [],
            "output_token_logprobs": [entry(one.token, one.logprob) for one in output.logprobs],
            "output_token_logprobs_length": len(output.logprobs),
        }
        if any(self.body.each("top_logprobs_num", 1, 0) if not isinstance(self.body.top_logprobs_num, list) else [1]):
            found["input_top_logprobs"] = []
            found["output_top_logprobs"] = [[entry(*top) for top in one.top] for one in output.logprobs]
        return found


def _finish_reason(ended: Ended, tokens: int, nothing: bool) -> dict[str, Any]:
    if nothing and ended.kind in ("stop", "length"):
        return {"type": "length", "length": 0}
    if ended.kind == "length":
        return {"type": "length", "length": tokens}
    if ended.kind == "stop":
        return {"type": "stop", "matched": ended.matched}
    return {"type": "abort", "message": ended.message, "status_code": None, "err_type": None}


def _rids(body: GenerateBody, count: int, active: set[str]) -> list[str]:
    """A string for a batch becomes rid_0, rid_1, ... Raises InvalidParameter for one that is in flight."""
    if isinstance(body.rid, list):
        rids = body.each("rid", count, None)
    elif body.rid is not None:
        rids = [body.rid] if count == 1 else [f"{body.rid}_{i}" for i in range(count)]
    else:
        rids = [uuid.uuid4().hex for _ in range(count)]
    for i, rid in enumerate(rids):
        if rid in active or rid in rids[:i]:
            raise InvalidParameter("rid", f"request id {rid} is already in flight")
    return rids


def _session_of(body: GenerateBody, sessions: SessionTable, count: int) -> Session | None:
    """Raises ApiError (400, as the contract says) for a session that can't take this turn."""
    params = body.session_params
    if params is None or params.id is None:
        return None
    if count != 1:
        raise InvalidParameter("session_params", "takes one prompt, not a batch")
    with suppress(NoSuchSession):
        session = sessions.get(params.id)
        if not session.settings.branching:
            for name in ("offset", "replace", "drop_previous_output"):
                if getattr(params, name):
                    raise InvalidParameter(f"session_params.{name}", "is not for streaming sessions")
            if session.turn is not None:
                raise ApiError(400, str(SessionBusy(f"session {session.id} already has an active request")))
        if session.closing:
            raise ApiError(400, f"close was requested for session {session.id}")
        return session
    raise ApiError(400, f"session id {params.id} does not exist", "session_params")


def _room(tokens: list[int], session: Session | None, limit: int) -> int:
    """What the context leaves for output. Raises InvalidParameter."""
    if not tokens and session is None:
        raise InvalidParameter("input_ids", "must not be empty")
    length = len(tokens)
    if session is not None and not session.settings.branching:
        length += len(session.conversation.tokens)
    if length >= limit:
        raise InvalidParameter(
            "input_ids",
            f"the input has {length} tokens, the maximum allowed length (context length) is {limit} tokens "
            "including output",
        )
    return max(limit - length - 1, 1)


def _begin(
    body: GenerateBody, server: _Server, session: Session, rid: str, tokens: list[int]
) -> tuple[list[int], Turn | None, BranchTree | None]:
    """Start the turn of a session -> its whole input, and what keeps account of it."""
    assert body.session_params is not None
    new = _without_bos(tokens, session, server.engine.tokenizer)
    if not session.settings.branching:
        turn = server.sessions.begin(session, new)
        return turn.tokens, turn, None
    tree = server.trees.setdefault(session.id, BranchTree())
    whole, gone = tree.begin(rid, body.session_params, new)
    for name in gone:
        server.engine.abort(name)
    return whole, None, tree


async def _token_ids(prompt: str | list[int], engine: AsyncEngine) -> list[int]:
    if isinstance(prompt, str):
        return (await encode(engine.tokenizer, prompt, True)).tolist()
    try:
        return check_token_ids(prompt, engine.info.vocab_size).tolist()
    except InvalidParameter as error:
        raise InvalidParameter("input_ids", str(error)) from None


def _without_bos(tokens: list[int], session: Session, tokenizer: Tokenizer) -> list[int]:
    """A turn after the first does not begin with BOS again."""
    has_history = bool(session.conversation.tokens)
    return tokens[1:] if has_history and tokens[:1] == [tokenizer.bos_token] and tokenizer.adds_bos else tokens
