"""The engine as seen by asyncio code: a child process and text streams."""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Unpack

import zmq
import zmq.asyncio

from freehold.config import EngineConfig
from freehold.contract.arrays import Int32
from freehold.contract.errors import EngineUnavailable, InvalidParameter, TimedOut, as_freehold_error
from freehold.contract.sampling_params import SamplingParams
from freehold.ipc import protocol as msg
from freehold.ipc.child import EngineChild
from freehold.ipc.engine_setup import EngineSetup
from freehold.ipc.restarts import Restarts
from freehold.ipc.streams import Delta, Stream
from freehold.models.loading.resolve import open_checkpoint, resolve_model
from freehold.runtime.engine_options import EngineOptions
from freehold.scheduler.request import make_requests
from freehold.text.detokenizer import Detokenizer
from freehold.text.loading import load_tokenizer
from freehold.text.tokenizer import Tokenizer

SILENCE_MAX_S = 5.0  # without a heartbeat the engine counts as unresponsive
GUARD_INTERVAL_S = 1.0
DEADLINE_GRACE_S = 1.0  # time for the engine to report a timeout itself
ENDED_WITH_CALLER = {"save"}  # the others continue: they are short, or change the engine
LONG_TEXT = 20_000  # characters
LONG_TEXTS = 2  # tokenized at once: each takes 200 times its size in memory


class AsyncEngine:
    """`AsyncEngine(model=None, **options)`; `await start()`, then `async for delta in stream(...)`; `await shutdown()`
    ends the process. Options are those of `EngineConfig`. Use from one event loop. A crashed process is restarted up to
    `max_restarts` times an hour; its requests end with EngineUnavailable."""

    def __init__(self, model: str | None = None, *, max_restarts: int = 0, **options: Unpack[EngineOptions]) -> None:
        self.setup = EngineSetup(EngineConfig(model=model, **options))
        self._restarts = Restarts(max_restarts)
        self.ready: msg.Ready | None = None
        self.stats = msg.Stats()
        self.failure: str | None = None
        self._last_words: str | None = None  # error message of a process that could not start
        self.draining = False
        self._streams: dict[str, Stream] = {}  # by the engine's id of each output
        self._jobs: dict[str, dict[str, Stream]] = {}  # the same by the client's request id
        self._calls: dict[int, tuple[msg.Call, asyncio.Future[msg.Reply]]] = {}
        self._call_numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._tokenizer: Tokenizer | None = None
        self._long_texts = asyncio.Semaphore(LONG_TEXTS)

    @property
    def config(self) -> EngineConfig:
        """Configuration with the current adapters and storage."""
        return self.setup.config

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
    def restarts(self) -> int:
        """Number of restarts of the process."""
        return self._restarts.count

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together, 0 while the model is loading."""
        return 0 if self.ready is None else self.ready.max_model_len

    @property
    def is_healthy(self) -> bool:
        is_loaded = self.ready is not None and self._tokenizer is not None
        return is_loaded and self._why_not() is None and self.is_responsive and self.stats.unwell is None

    def _check_serving(self) -> None:
        """Raise EngineUnavailable while no request can be accepted."""
        if self.ready is None or self._why_not():
            raise EngineUnavailable(self._why_not() or "the engine is loading the model")

    def _why_not(self) -> str | None:
        closing = "the server is shutting down" if self.draining else None
        return f"the engine has failed: {self.failure}" if self.failure else closing

    # -- lifecycle --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process and wait until it serves. Raises EngineUnavailable if it can't."""
        self._folder = tempfile.TemporaryDirectory(prefix="freehold-")
        self._context = zmq.asyncio.Context()
        await self._spawn()
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._guard())]
        tokenizer = asyncio.create_task(asyncio.to_thread(self._load_tokenizer))
        while self.ready is None and self.failure is None:
            await asyncio.sleep(0.02)
        (found,) = await asyncio.gather(tokenizer, return_exceptions=True)
        if isinstance(found, BaseException):
            self.failure = self.failure or f"its tokenizer can't be loaded: {found}"
        if self.ready is None or isinstance(found, BaseException):
            raise EngineUnavailable(self._why_not() or "the engine did not start")
        self._tokenizer = found

    async def _spawn(self) -> None:
        address = f"ipc://{self._folder.name}/engine-{self.restarts}"
        try:
            self._child = await EngineChild.spawn(self._context, address, self.setup)
        except EngineUnavailable as error:
            self.failure = str(error)
            raise
        self._listening = asyncio.create_task(self._listen(self._child))

    def _load_tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(open_checkpoint(resolve_model(self.config.model)), self.config.chat_template)
        tokenizer.encode("")  # warms up, so that the first request need not wait
        return tokenizer

    async def encode(self, text: str, add_special_tokens: bool, is_prompt: bool = True) -> Int32:
        """Return a text's tokens int32 [n]. Long texts are tokenized in a thread. Raises InvalidParameter for a prompt
        that can't fit, without tokenizing it."""
        tokenizer = self.tokenizer
        least = len(text) // tokenizer.longest_piece
        if is_prompt and least > self.context_length:
            limit = f"the maximum context length is {self.context_length} tokens"
            raise InvalidParameter("prompt", f"the prompt has {len(text)} characters, at least {least} tokens; {limit}")
        if len(text) < LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens)
        async with self._long_texts:
            return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)

    async def shutdown(self) -> None:
        """End the process and abandon running requests. Idempotent."""
        if not self._tasks:
            return
        self.draining = True
        await self._child.stop()
        tasks = [*self._tasks, self._listening]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        self._child.close()
        self._context.destroy(linger=0)
        self._folder.cleanup()

    async def _watch(self) -> None:
        """When the process ends, fail everything pending and restart it if allowed."""
        while True:
            code = await self._child.wait()
            await asyncio.sleep(0.1)  # its last messages may still be in transit
            self.ready = None
            self._listening.cancel()
            delay = self._restarts.delay(time.monotonic())
            if self.draining or not self.setup.has_served or delay is None:  # a first start would fail again
                if not self.draining or self._streams:
                    cause = "" if self._last_words is None else f": {self._last_words}"
                    self.failure = self.failure or f"its process ended with code {code}{cause}"
                self._end_all(EngineUnavailable(self._why_not() or "the engine has ended"))
                return
            self._restarts.add(time.monotonic())
            self._end_all(EngineUnavailable(f"the engine's process ended with code {code}; it is started again"))
            print(f"freehold: the engine's process ended with code {code}: restarting it in {delay:g} s "
                  f"({self._restarts})", file=sys.stderr, flush=True)  # fmt: skip
            self._child.close()
            await asyncio.sleep(delay)
            await self._spawn()

    async def _guard(self) -> None:
        """Kill the process if it is silent for longer than a step may take. If this process was suspended (Ctrl-Z), the
        engine may have been too, so reset its silence."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(GUARD_INTERVAL_S)
            if time.monotonic() - before > GUARD_INTERVAL_S + SILENCE_MAX_S:
                self._child.heard = time.monotonic()
            if self.ready is not None and self._child.silence > self.config.watchdog_timeout:
                print("freehold: the engine's process does not answer: killing it", file=sys.stderr, flush=True)
                self._child.kill()

    @property
    def is_responsive(self) -> bool:
        """Return whether the process has sent a heartbeat lately."""
        return self._child.silence < SILENCE_MAX_S

    def _end_all(self, error: EngineUnavailable) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)
        for _, future in self._calls.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # the caller may have left, and asyncio would log an unretrieved exception
        self._streams.clear()
        self._calls.clear()

    # -- generation -------------------------------------------------------------------------------------

    async def stream(
        self,
        prompts: Sequence[Int32],
        params: SamplingParams,
        request_id: str | None = None,
        options: msg.Options = msg.Options(),  # noqa: B008, it is immutable
        skip_special_tokens: bool = True,
        marks: Mapping[int, str] = MappingProxyType({}),
    ) -> AsyncGenerator[Delta]:
        """Complete each prompt int32 [n] `params.n` times, yielding deltas of all outputs as they arrive. `marks` maps
        certain tokens to the text that replaces them.

        Raises InvalidParameter, QueueFull or EngineUnavailable. Closing the iterator aborts unfinished outputs; the
        engine notices before its next step.
        """
        self._check_serving()
        base = request_id or uuid.uuid4().hex
        if self.is_running(base):
            raise InvalidParameter("rid", f"request id {base} is already in flight")
        deltas: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        streams = self._jobs[base] = {}
        deadline = self._set_deadline(streams, options.timeout)
        try:
            for number, prompt in enumerate(prompts):
                for request in make_requests(f"{base}-{number}", prompt, params):
                    if request.id in self._streams:
                        raise InvalidParameter("rid", f"request id {base} is already in flight")
                    detokenizer = Detokenizer(self.tokenizer, params, skip_special_tokens, marks)
                    accepted = asyncio.get_running_loop().create_future()
                    stream = Stream(len(streams), detokenizer, deltas, accepted, self.config.stream_interval)
                    streams[request.id] = self._streams[request.id] = stream
                    await self._child.send(
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
            if deadline is not None:
                deadline.cancel()
            del self._jobs[base]
            for name, stream in streams.items():
                if not stream.accepted.cancel() and not stream.accepted.cancelled():
                    stream.accepted.exception()  # the caller has left: mark the exception as retrieved
                if self._streams.pop(name, None) is not None:
                    self._child.send_soon(msg.Abort(name))

    def _set_deadline(self, streams: dict[str, Stream], timeout: float | None) -> asyncio.TimerHandle | None:
        """Fail the streams after `timeout`, in case a hung engine does not."""
        limits = [limit for limit in (timeout, self.config.request_timeout) if limit is not None]
        if not limits:
            return None
        seconds = min(limits)

        def fail() -> None:
            for name, stream in streams.items():
                if self._streams.pop(name, None) is not None:
                    stream.fail(TimedOut(f"timed out after {seconds:g} s"))

        return asyncio.get_running_loop().call_later(seconds + DEADLINE_GRACE_S, fail)

    @property
    def is_busy(self) -> bool:
        """Return whether any request is in flight."""
        return bool(self._jobs)

    def abandon(self, reason: str) -> None:
        """End all requests in flight with EngineUnavailable."""
        self._end_all(EngineUnavailable(reason))

    def is_running(self, request_id: str) -> bool:
        """Return whether an output of this request is in flight."""
        return request_id in self._jobs

    def abort(self, request_id: str) -> None:
        """End a request as if finished: its caller gets the output so far. Does nothing if there is no such request."""
        for name in self._jobs.get(request_id, ()):
            self._child.send_soon(msg.Abort(name))

    def abort_by_prefix(self, prefix: str) -> None:
        """Abort all requests whose id starts with `prefix`."""
        for request_id in self._jobs:
            if request_id.startswith(prefix):
                self.abort(request_id)

    def forget_session(self, name: str) -> None:
        """Tell the engine to drop what it keeps for a session."""
        if self.ready is not None and self._why_not() is None:
            self._child.send_soon(msg.Forget(name))

    async def call(self, procedure: str, argument: Any = None) -> Any:
        """Call a procedure of the engine process (`procedures.py`) and return its result. Raises what it raises."""
        self._check_serving()
        call = msg.Call(next(self._call_numbers), procedure, argument)
        future: asyncio.Future[msg.Reply] = asyncio.get_running_loop().create_future()
        self._calls[call.number] = call, future  # until answered, even if the caller leaves
        try:
            await self._child.send(call)
        except BaseException:
            self._calls.pop(call.number, None)
            raise
        try:
            while not (await asyncio.wait({future}, timeout=1.0))[0]:
                if not self.is_responsive:
                    raise EngineUnavailable("the engine does not answer")
        except asyncio.CancelledError:
            if procedure in ENDED_WITH_CALLER and self._calls.pop(call.number, None) is not None:
                self._child.send_soon(msg.Cancel(call.number))
            raise
        reply = await future
        if reply.failure is not None:
            raise reply.failure.error()
        return reply.value

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter, and reload it if the process restarts. Raises InvalidParameter."""
        if not name or "=" in name:
            raise InvalidParameter("lora_name", "must be a name without =")
        await self.call("load_adapter", {"name": name, "path": path})

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests that began with it finish with it. Raises NotFound."""
        await self.call("unload_adapter", name)

    # -- reports ----------------------------------------------------------------------------------------

    async def _listen(self, child: EngineChild) -> None:
        while True:
            report = await child.receive()
            if isinstance(report, msg.Progress):
                self._take_progress(report)
            elif isinstance(report, msg.Accepted):
                if (stream := self._streams.get(report.id)) and not stream.accepted.done():
                    stream.accepted.set_result(None)
            elif isinstance(report, msg.Rejected):
                if stream := self._streams.pop(report.id, None):
                    stream.fail(report.failure.error())
            elif isinstance(report, msg.Reply):
                self._take_reply(report)
            elif isinstance(report, msg.Ready):
                self.ready = report
                self.setup, self._last_words = replace(self.setup, has_served=True), None
            elif self.setup.has_served:
                self._last_words = report.message
                print(f"freehold: the engine did not start: {report.message}", file=sys.stderr, flush=True)
            else:
                self.failure = report.message

    def _take_reply(self, reply: msg.Reply) -> None:
        """Record the change in the setup, even if the caller no longer waits."""
        if reply.number not in self._calls:
            return
        call, future = self._calls.pop(reply.number)
        if reply.failure is None:
            self.setup = self.setup.after(call.procedure, call.argument, reply.value)
        if not future.done():
            future.set_result(reply)

    def _take_progress(self, progress: msg.Progress) -> None:
        if progress.stats is not None:
            self.stats = progress.stats
        ended = {end.id: end for end in progress.ended}
        positions: dict[str, list[int]] = {name: [] for name in ended}
        for i, name in enumerate(progress.ids):
            positions.setdefault(name, []).append(i)
        for name, where in positions.items():
            stream, end = self._streams.get(name), ended.get(name)
            if stream is None:
                continue
            if end is not None:
                del self._streams[name]
            try:
                stream.take(stream.news(name, where, end, progress))
            except BaseException as error:  # libraries raise anything, panics included
                if self._streams.pop(name, None) is not None:
                    self._child.send_soon(msg.Abort(name))
                stream.fail(as_freehold_error(error))
