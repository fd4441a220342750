"""Outputs in transit to their callers."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass

from freehold.contract.step import TokenLogprobs
from freehold.ipc import protocol as msg
from freehold.text.answers.events import Event
from freehold.text.detokenizer import Detokenizer


@dataclass(frozen=True)
class Delta:
    """News of output `index` (of prompt `index // n`). `text` may be empty while some is held back; `ends` are the
    lengths of the whole text after each token, held-back text included. `events` is the parsed text, and
    `reasoning_tokens` is set at the end; the reader fills both."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    ended: msg.Ended | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list[TokenLogprobs])
    ends: list[int] = dataclasses.field(default_factory=list[int])
    events: list[Event] = dataclasses.field(default_factory=list[Event])
    reasoning_tokens: int = 0
    embedding: bytes = b""

    def followed_by(self, later: Delta) -> Delta:
        """Return both deltas merged, before their text is parsed."""
        return Delta(
            self.index, self.text + later.text, self.tokens + later.tokens, self.logprobs + later.logprobs,
            later.ended, later.cached_tokens, self.prompt_logprobs + later.prompt_logprobs, self.ends + later.ends,
            embedding=self.embedding or later.embedding,
        )  # fmt: skip


@dataclass
class Stream:
    """One output in transit to its caller: the first news immediately, then `interval` tokens at a time."""

    index: int
    detokenizer: Detokenizer
    deltas: asyncio.Queue[Delta | Exception]
    accepted: asyncio.Future[None]
    interval: int = 1
    cached_tokens: int = 0
    _kept: Delta | None = None
    _has_sent: bool = False

    def fail(self, error: Exception) -> None:
        """Raise the error where the stream is awaited."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
        else:
            self.deltas.put_nowait(error)

    def news(self, name: str, where: list[int], end: msg.Ended | None, progress: msg.Progress) -> Delta:
        """Return this output's delta from `progress`, where its tokens are at `where`. Raises what decoding raises."""
        tokens = [progress.tokens[i] for i in where]
        logprobs = [progress.logprobs[i] for i in where if i in progress.logprobs]
        if end is None:
            text = "".join(self.detokenizer.add(token) for token in tokens)
        else:
            text = self.detokenizer.finish(end.matched, tokens)
        self.cached_tokens = progress.cached.get(name, self.cached_tokens)
        ends = self.detokenizer.ends[-len(tokens) :] if tokens else []
        return Delta(
            self.index, text, tokens, logprobs, end, self.cached_tokens, progress.prompt_logprobs.get(name, []), ends,
            embedding=progress.embeddings.get(name, b""),
        )  # fmt: skip

    def take(self, delta: Delta) -> None:
        """Send a delta, or hold it until it has `interval` tokens."""
        if self._kept is not None:
            delta = self._kept.followed_by(delta)
        if self._has_sent and delta.ended is None and len(delta.tokens) < self.interval:
            self._kept = delta
            return
        self._kept, self._has_sent = None, True
        self.deltas.put_nowait(delta)
