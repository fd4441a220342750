"""Outputs on their way to whoever asked."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass

from freehold.ipc import protocol as msg
from freehold.step import TokenLogprobs
from freehold.text.answers.events import Event
from freehold.text.detokenizer import Detokenizer


@dataclass(frozen=True)
class Delta:
    """News of output `index` (of prompt `index // n`). `text` may be empty while some is held back; `ends` are the
    lengths of the whole text behind each token, held-back text included. `events` are what the text says, once
    somebody has read it, and at the end how many tokens were thoughts."""

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


@dataclass
class Stream:
    """One output on its way to whoever asked."""

    index: int
    detokenizer: Detokenizer
    deltas: asyncio.Queue[Delta | Exception]
    accepted: asyncio.Future[None]
    cached_tokens: int = 0
