"""Offline generation: the whole engine in one process, without HTTP."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np

from freehold.config import EngineConfig
from freehold.contract.adapter import Adapter
from freehold.contract.arrays import Float32, Int32
from freehold.contract.errors import ChatTemplateError, EngineFailed, EngineStuck, InvalidParameter
from freehold.contract.sampling_params import SamplingParams
from freehold.contract.step import TokenLogprobs
from freehold.engine.adapters import Adapters
from freehold.memory import PageCounts
from freehold.models.tensor import Checkpoint
from freehold.runtime.assembly import assemble
from freehold.runtime.engine_options import EngineOptions
from freehold.scheduler.request import Request, check_token_ids, make_requests
from freehold.scheduler.results import StepOutput
from freehold.text.detokenizer import Detokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Completion:
    """One output. `token_ids` holds all generated tokens, the stop token included. `text` ends before the stop token or
    stop string. `finish_reason` is stop, length or error; `error` explains the last."""

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the tokens after `prompt_logprobs_start`
    matched: int | str | None = None
    error: str | None = None
    retractions: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict[str, int])


class LLM:
    """`LLM(model=None, **options).generate(prompts, SamplingParams(...))`.

    Options are the fields of `freehold.config.EngineConfig`, named as the server's flags; `checkpoint` is a model
    already open. Streams may be interleaved with each other and with `generate`; a lock serializes threads. Raises
    EngineStuck if the engine does not answer. A context manager: `close` ends the engine's thread.
    """

    def __init__(
        self, model: str | None = None, *, checkpoint: Checkpoint | None = None, **options: Unpack[EngineOptions]
    ):
        assembly = assemble(EngineConfig(model=model, **options), checkpoint)
        self.config = assembly.config
        self.spec = assembly.spec
        self.tokenizer = assembly.tokenizer
        self.scheduler = assembly.scheduler
        self.mover = assembly.mover
        self._assembly = assembly
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._streams: dict[str, list[int]] = {}  # tokens of open streams not yet taken

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._assembly.shutdown()

    @property
    def page_counts(self) -> PageCounts:
        return self.scheduler.memory.counts()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_progress: Callable[[int], None] = lambda finished: None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Complete `prompts`: one string, one list of token ids, or a list of either; with a loaded LoRA adapter, or
        one per prompt.

        Return the completions in order, `n` adjacent ones for each prompt. `on_progress` is called with the number of
        outputs finished so far. Raises ValueError before anything runs if a prompt can never be served.
        """
        requests = self.requests(_as_list(prompts), sampling_params, adapter)
        for request in requests:
            self._compile(request)
        with self._working():
            for request in requests:
                self.scheduler.lifecycle.check_fits(request)
            self._run(requests, on_progress)
        return [self._completion(request) for request in requests]

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: str = "last") -> list[Float32]:
        """Return the final hidden state of each prompt's last token, or the mean of all [hidden_size], not normalized.
        Raises as `generate`."""
        requests = self.requests(_as_list(prompts), SamplingParams(max_tokens=1, temperature=0, pooling=pooling))
        with self._working():
            for request in requests:
                self.scheduler.lifecycle.check_fits(request)
            self._run(requests, lambda finished: None)
        return [self._embedding(request) for request in requests]

    @staticmethod
    def _embedding(request: Request) -> Float32:
        if request.embedding is None:
            assert request.finish is not None
            raise request.finish.error or EngineFailed("the request ended before its prompt was computed")
        return request.embedding

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_progress: Callable[[int], None] = lambda finished: None,
    ) -> list[Completion]:
        """Answer one or several conversations, each a list of {"role": ..., "content": ...}. Raises ChatTemplateError
        if the model has no chat template or the template rejects the messages; else as `generate`."""
        one = len(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        return self.generate([self.render(each) for each in conversations], sampling_params, on_progress)

    def render(self, messages: Messages) -> list[int]:
        """Return the prompt tokens of a conversation. Raises ChatTemplateError."""
        template = self.tokenizer.chat_template
        if template is None:
            raise ChatTemplateError("the model has no chat template: give one (chat_template), or use generate")
        return self.tokenizer.encode(template.render(messages), add_special_tokens=False).tolist()

    def stream(self, prompt: Prompt, sampling_params: SamplingParams) -> Iterator[str | Completion]:
        """Complete one prompt: yield its text piece by piece, then the whole completion. Closing the iterator early
        aborts the request."""
        (request,) = self.requests([prompt], replace(sampling_params, n=1))
        detokenizer = Detokenizer(self.tokenizer, request.params)
        self._compile(request)
        with self._working():
            self.scheduler.add(request)
        self._streams[request.id] = []
        try:
            while True:
                tokens = self._next_tokens(request)
                if request.finish is not None:
                    break
                yield from map(detokenizer.add, tokens)
            yield detokenizer.finish(request.finish.matched, tokens)
            yield self._completion(request)
        finally:
            del self._streams[request.id]
            with self._working():
                self._abandon([request])

    def _compile(self, request: Request) -> None:
        """Compile the request's grammar. Raises InvalidParameter."""
        constraint, grammars = request.params.constraint, self._assembly.grammars
        if constraint is None:
            return
        if grammars is None:
            raise InvalidParameter(constraint.field, "constrained output is switched off (grammar_backend none)")
        request.grammar = grammars.result(constraint)

    def _next_tokens(self, request: Request) -> list[int]:
        """Return a stream's new tokens, running a step if it has none. Tokens of other streams are kept for them."""
        with self._working():
            if not self._streams[request.id] and request.finish is None:
                self._step()
            tokens, self._streams[request.id] = self._streams[request.id], []
        return tokens

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Hold the lock and bind page moves to this thread."""
        with self._lock:
            self.scheduler.memory.epochs.bind_thread()
            yield

    def _step(self) -> StepOutput:
        """Run one step. Raises EngineStuck."""
        output = self.scheduler.step()
        self._deliver(output)
        self._publish()
        if self.scheduler.stuck is not None:
            raise EngineStuck(self.scheduler.stuck)
        return output

    def _publish(self) -> None:
        """Publish cache events to subscribers."""
        events = self.scheduler.memory.events
        if events is not None:
            self._assembly.publish(events.take())

    def _deliver(self, output: StepOutput) -> None:
        for request, token in zip(output.requests, output.tokens, strict=True):
            if request.id in self._streams:
                self._streams[request.id].append(token)

    def requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Request]:
        """Return the requests that `generate` would run, for callers that drive the scheduler themselves."""
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        adapters = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else list(adapter)
        for name, given in (("sampling_params", each), ("adapter", adapters)):
            if len(given) != len(prompts):
                raise ValueError(f"{name}: {len(given)} given for {len(prompts)} prompts")
        return [
            request
            for prompt, chosen, name in zip(prompts, each, adapters, strict=True)
            for request in make_requests(
                f"offline-{next(self._ids)}", self._tokens(prompt), chosen, self._adapter(name)
            )
        ]

    def _adapter(self, name: str | None) -> Adapter | None:
        return None if name is None else self._taking_adapters().find(name)

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter saved by PEFT. Raises InvalidParameter."""
        self._taking_adapters().load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests that began with it finish with it. Raises NotFound."""
        self._taking_adapters().unload(name)

    def _taking_adapters(self) -> Adapters:
        if self._assembly.adapters is None:
            raise InvalidParameter("adapter", "adapters are switched off (enable_lora)")
        return self._assembly.adapters

    def _tokens(self, prompt: Prompt) -> Int32:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return check_token_ids(prompt, self.spec.vocab_size)

    def _run(self, requests: list[Request], on_progress: Callable[[int], None]) -> None:
        waiting, running = deque(requests), {request.id for request in requests}
        try:
            while running:
                while waiting and len(self.scheduler.queue) < self.config.max_queued_requests:
                    self.scheduler.add(waiting.popleft())
                ended = {request.id for request in self._step().ended} & running
                running -= ended
                if ended:
                    on_progress(len(requests) - len(running))
        finally:
            self._abandon(requests)
        self.scheduler.audit()

    def _abandon(self, requests: Sequence[Request]) -> None:
        """Abort the requests after an exception (Ctrl-C) and free their resources. After a normal end, only collect the
        step still in flight."""
        for request in requests:
            self.scheduler.abort(request.id)
        while self.scheduler.has_work and self.scheduler.stuck is None:
            self._deliver(self.scheduler.step())
            self._publish()
            if self.scheduler.requests:
                return  # other open streams continue when they are read

    def _completion(self, request: Request) -> Completion:
        assert request.finish is not None
        detokenizer = Detokenizer(self.tokenizer, request.params)
        detokenizer.finish(request.finish.matched, request.output.tolist())
        return Completion(
            text=detokenizer.text,
            token_ids=request.output.tolist(),
            finish_reason=request.finish.kind.value,
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens or 0,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            prompt_logprobs=request.prompt_logprobs if request.params.prompt_logprobs_start is not None else None,
            matched=request.finish.matched,
            error=request.finish.message or None,
            retractions=request.retractions,
            cached_by_tier=request.cached_by_tier,
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and all(isinstance(item, (int, np.integer)) for item in prompts):
        return [prompts]  # pyright: ignore[reportReturnType]
    return list(prompts)  # pyright: ignore[reportReturnType]
