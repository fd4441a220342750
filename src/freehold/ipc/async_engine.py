"""The engine, as asyncio code sees it: a child process and streams of text."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import zmq
import zmq.asyncio

from freehold.arrays import Int32
from freehold.config import EngineConfig
from freehold.engine_options import EngineOptions
from freehold.errors import EngineUnavailable, InvalidParameter
from freehold.ipc import protocol as msg
from freehold.models.loading.resolve import open_checkpoint, resolve_model
from freehold.sampling_params import SamplingParams
from freehold.scheduler.request import make_requests
from freehold.step import TokenLogprobs
from freehold.text.detokenizer import Detokenizer
from freehold.text.loading import load_tokenizer
from freehold.text.tokenizer import Tokenizer

STOP_TIMEOUT_S = 10.0
LONG_TEXT = 20_000  # characters
LONG_TEXTS = 2  # tokenized at a time: each takes 200 times its size in memory


@dataclass(frozen=True)
class Delta:
    """News of output `index` (of prompt `index // n`). `text` may be empty while some is held back."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    ended: msg.Ended | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list[TokenLogprobs])


@dataclass
class _Stream:
    """One output on its way to whoever asked."""

    index: int
    detokenizer: Detokenizer
    deltas: asyncio.Queue[Delta | Exception]
    accepted: asyncio.Future[None]
    cached_tokens: int = 0


class AsyncEngine:
    """`AsyncEngine(model=None, **options)`; `await start()`, then `async for delta in stream(...)`;
    `await shutdown()` ends the process. Options are those of `EngineConfig`. Use from one event loop.
    """

    def __init__(self, model: str | None = None, **options: Unpack[EngineOptions]) -> None:
        self.config = EngineConfig(model=model, **options)
        self.ready: msg.Ready | None = None
        self.stats = msg.Stats()
        self.failure: str | None = None
        self.draining = False
        self._streams: dict[str, _Stream] = {}  # by the engine's name of each output
        self._jobs: dict[str, dict[str, _Stream]] = {}  # the same by the request id that the client knows
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_number = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._tokenizer: Tokenizer | None = None
        self._long_texts = asyncio.Semaphore(LONG_TEXTS)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineUnavailable(self._why_not() or "the engine is loading the model")
        return self._tokenizer

    @property
    def info(self) -> msg.Ready:
        if self.ready is None:
            raise EngineUnavailable(self._why_not() or "the engine is loading the model")
        return self.ready

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together, 0 while the model is loading."""
        return 0 if self.ready is None else self.ready.max_model_len

    @property
    def is_healthy(self) -> bool:
        is_loaded = self.ready is not None and self._tokenizer is not None
        return is_loaded and self._why_not() is None and self.stats.unwell is None

    def _why_not(self) -> str | None:
        if self.failure:
            return f"the engine has failed: {self.failure}"
        return "the server is shutting down" if self.draining else None

    # -- life -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process and wait until it serves. Raises EngineUnavailable if it can't."""
        self._folder = tempfile.TemporaryDirectory(prefix="freehold-")
        address = f"ipc://{self._folder.name}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        options = json.dumps(dataclasses.asdict(self.config))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "freehold.ipc.engine_process",
            address,
            options,
            str(os.getpid()),
            start_new_session=True,
        )
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._listen())]
        tokenizer = asyncio.create_task(asyncio.to_thread(self._load_tokenizer))
        while self.ready is None and self.failure is None:
            await asyncio.sleep(0.02)
        if self.ready is None:
            raise EngineUnavailable(self._why_not() or "the engine did not start")
        self._tokenizer = await tokenizer

    def _load_tokenizer(self) -> Tokenizer:
        return load_tokenizer(open_checkpoint(resolve_model(self.config.model)))

    async def encode(self, text: str, add_special_tokens: bool, is_prompt: bool = True) -> Int32:
        """The tokens int32 [n] of a text, made in a thread if it is long. A prompt that can't fit is refused unread:
        raises InvalidParameter."""
        tokenizer = self.tokenizer
        least = len(text) // tokenizer.longest_piece
        if is_prompt and least > self.context_length:
            raise InvalidParameter(
                "prompt",
                f"the prompt has {len(text)} characters, which are more than {least} tokens; "
                f"the maximum context length is {self.context_length} tokens",
            )
        if len(text) < LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens)
        async with self._long_texts:
            return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)

    async def shutdown(self) -> None:
        """End the process, abandoning what runs. Idempotent."""
        if not self._tasks:
            return
        self.draining = True
        if self._process.returncode is None:
            self._send_soon(msg.Stop())
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._socket.close()
        self._context.destroy(linger=0)
        self._folder.cleanup()

    async def _watch(self) -> None:
        """Tell everybody when the process ends."""
        code = await self._process.wait()
        await asyncio.sleep(0.1)  # its last words may still be on their way
        if not self.draining or self._streams:
            self.failure = self.failure or f"its process ended with code {code}"
            error = EngineUnavailable(self._why_not() or "the engine has ended")
            for stream in list(self._streams.values()):
                self._fail(stream, error)
            for future in self._calls.values():
                future.set_exception(error)
            self._streams.clear()
            self._calls.clear()

    def _fail(self, stream: _Stream, error: Exception) -> None:
        if not stream.accepted.done():
            stream.accepted.set_exception(error)
        else:
            stream.deltas.put_nowait(error)

    # -- generation -------------------------------------------------------------------------------------

    async def stream(
        self,
        prompts: Sequence[Int32],
        params: SamplingParams,
        request_id: str | None = None,
        options: msg.Options = msg.Options(),  # noqa: B008, it can't change
        skip_special_tokens: bool = True,
    ) -> AsyncGenerator[Delta]:
        """Complete each prompt int32 [n] `params.n` times. The deltas of all outputs, as they come.

        Raises InvalidParameter, QueueFull or EngineUnavailable. Closing the iterator aborts what has not
        ended; the engine takes notice before its next step.
        """
        if reason := self._why_not():
            raise EngineUnavailable(reason)
        base = request_id or uuid.uuid4().hex
        if self.is_running(base):
            raise InvalidParameter("rid", f"request id {base} is already in flight")
        deltas: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        streams = self._jobs[base] = {}
        try:
            for number, prompt in enumerate(prompts):
                for request in make_requests(f"{base}-{number}", prompt, params):
                    if request.id in self._streams:
                        raise InvalidParameter("rid", f"request id {base} is already in flight")
                    detokenizer = Detokenizer(self.tokenizer, params, skip_special_tokens)
                    accepted = asyncio.get_running_loop().create_future()
                    stream = _Stream(len(streams), detokenizer, deltas, accepted)
                    streams[request.id] = self._streams[request.id] = stream
                    await self._send(
                        msg.Submit(request.id, request.prompt.tobytes(), request.params, request.seed, options)
                    )
            for stream in streams.values():
                await stream.accepted
            left = len(streams)
            while left:
                delta = await deltas.get()
                if isinstance(delta, Exception):
                    raise delta
                left -= delta.ended is not None
                yield delta
        finally:
            del self._jobs[base]
            for name, stream in streams.items():
                stream.accepted.cancel()
                if self._streams.pop(name, None) is not None:
                    self._send_soon(msg.Abort(name))

    def is_running(self, request_id: str) -> bool:
        """Whether an output of that request is on its way."""
        return request_id in self._jobs

    def abort(self, request_id: str) -> None:
        """End a request as if it had been finished: whoever waits for it gets what there is. Does nothing if there is
        no such request."""
        for name in self._jobs.get(request_id, ()):
            self._send_soon(msg.Abort(name))

    def abort_by_prefix(self, prefix: str) -> None:
        """The same for all requests whose id begins like that."""
        for request_id in self._jobs:
            if request_id.startswith(prefix):
                self.abort(request_id)

    def forget_session(self, name: str) -> None:
        """The engine need not keep anything for a session any more."""
        if self.ready is not None and self._why_not() is None:
            self._send_soon(msg.Forget(name))

    async def call(self, procedure: str, argument: Any = None) -> Any:
        """Call a procedure of the engine process (`procedures.py`) -> its result. Raises what it raises."""
        if self.ready is None or self._why_not():
            raise EngineUnavailable(self._why_not() or "the engine is loading the model")
        self._call_number += 1
        future = self._calls[self._call_number] = asyncio.get_running_loop().create_future()
        await self._send(msg.Call(self._call_number, procedure, argument))
        reply: msg.Reply = await future
        if reply.failure is not None:
            raise reply.failure.error()
        return reply.value

    async def _send(self, command: msg.Command) -> None:
        try:
            message = msg.encode(command)
        except OverflowError:
            raise InvalidParameter("body", "has an integer that does not fit into 64 bits") from None
        await self._socket.send(message)

    def _send_soon(self, command: msg.Command) -> None:
        """From a place that must not wait; the socket is never full."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send(msg.encode(command), zmq.NOBLOCK)

    # -- reports ----------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            report = msg.decode_report(await self._socket.recv())
            if isinstance(report, msg.Progress):
                self._take_progress(report)
            elif isinstance(report, msg.Accepted):
                if (stream := self._streams.get(report.id)) and not stream.accepted.done():
                    stream.accepted.set_result(None)
            elif isinstance(report, msg.Rejected):
                if stream := self._streams.pop(report.id, None):
                    self._fail(stream, report.failure.error())
            elif isinstance(report, msg.Reply):
                if (future := self._calls.pop(report.number, None)) and not future.done():
                    future.set_result(report)
            elif isinstance(report, msg.Ready):
                self.ready = report
            else:
                self.failure = report.message

    def _take_progress(self, progress: msg.Progress) -> None:
        if progress.stats is not None:
            self.stats = progress.stats
        ended = {end.id: end for end in progress.ended}
        positions: dict[str, list[int]] = {name: [] for name in ended}
        for i, name in enumerate(progress.ids):
            positions.setdefault(name, []).append(i)
        for name, where in positions.items():
            stream = self._streams.get(name)
            if stream is None:
                continue
            tokens = [progress.tokens[i] for i in where]
            logprobs = [progress.logprobs[i] for i in where if i in progress.logprobs]
            end = ended.get(name)
            if end is None:
                text = "".join(stream.detokenizer.add(token) for token in tokens)
            else:
                text = stream.detokenizer.finish(end.matched, tokens)
                del self._streams[name]
            stream.cached_tokens = progress.cached.get(name, stream.cached_tokens)
            scores = progress.prompt_logprobs.get(name, [])
            stream.deltas.put_nowait(Delta(stream.index, text, tokens, logprobs, end, stream.cached_tokens, scores))
