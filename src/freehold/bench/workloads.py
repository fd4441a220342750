"""Five typical workloads of one machine's users, each measured by its client."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pydoc_data.topics import topics

import httpx

from freehold.bench.client import Sample, complete
from freehold.bench.load import VOCABULARY

Figures = dict[str, float]


class Target:
    """A server to send to. `seed` changes with every round, so that no cache has a prompt of an earlier one."""

    def __init__(self, client: httpx.AsyncClient, model: str, seed: int):
        self.seed = seed
        self._client = client
        self._model = model
        self._random = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return self._random.choices(VOCABULARY, k=count)

    def prose(self, words: int) -> str:
        """Return a stretch of English."""
        text = " ".join(topics[name] for name in sorted(topics)).split()
        start = self._random.randrange(len(text) - words)
        return " ".join(text[start : start + words])

    async def complete(self, prompt: list[int] | str, output_len: int) -> Sample:
        """Complete a prompt. Raises RuntimeError if the server refuses, or returns another number of tokens."""
        sample = await complete(self._client, self._model, prompt, output_len)
        if sample.error is not None:
            raise RuntimeError(f"the server answered: {sample.error}")
        if sample.output_tokens != output_len:
            raise RuntimeError(f"{sample.output_tokens} tokens instead of {output_len}")
        return sample

    async def complete_all(self, prompts: list[list[int]], output_len: int, streams: int) -> list[Sample]:
        gate = asyncio.Semaphore(streams)

        async def one(prompt: list[int]) -> Sample:
            async with gate:
                return await self.complete(prompt, output_len)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


@dataclass(frozen=True)
class Workload:
    """`run` sends all of one round and returns figures by name, the headline first. `goal`: times the best peer."""

    name: str
    what: str
    unit: str
    more_is_better: bool
    goal: float
    run: Callable[[Target], Awaitable[Figures]]


async def _decode(target: Target, streams: int, requests: int) -> Figures:
    started = time.monotonic()
    samples = await target.complete_all([target.tokens(64) for _ in range(requests)], 128, streams)
    return {"output tokens/s": 128 * requests / (time.monotonic() - started), **latency(samples)}


async def _one_stream(target: Target) -> Figures:
    return await _decode(target, 1, 3)


async def _sixteen_streams(target: Target) -> Figures:
    return await _decode(target, 16, 16)


async def _prefill(target: Target) -> Figures:
    """Measure the first token: the rest is decoding."""
    samples = await target.complete_all([target.tokens(1500) for _ in range(3)], 16, 1)
    return {"prompt tokens/s": 1500 / statistics.median(one.first_token for one in samples), **latency(samples)}


async def _shared_prefix(target: Target) -> Figures:
    shared = target.tokens(1200)
    started = time.monotonic()
    samples = await target.complete_all([shared + target.tokens(64) for _ in range(32)], 32, 8)
    return {"seconds": time.monotonic() - started, **latency(samples)}


async def _conversations(target: Target) -> Figures:
    """Run eight conversations at once, six turns each; the whole history, with answers, is sent again as text."""

    async def talk(history: str, questions: list[str]) -> list[Sample]:
        samples: list[Sample] = []
        for question in questions:
            history += question
            samples.append(await target.complete(history, 48))
            history += samples[-1].text
        return samples

    talks = [[f"\nUser: {target.prose(28)}\nAssistant:" for _ in range(6)] for _ in range(8)]
    started = time.monotonic()
    samples = await asyncio.gather(*(talk(f"Conversation {target.seed}/{i}.", talks[i]) for i in range(8)))
    seconds = time.monotonic() - started
    later = [sample for conversation in samples for sample in conversation[1:]]
    return {"seconds": seconds, **latency(later)}


def latency(samples: list[Sample]) -> Figures:
    """Return median and 95th percentile of time to first token and between tokens, in ms."""
    first = sorted(sample.first_token for sample in samples)
    gaps = sorted(gap for sample in samples for gap in sample.gaps)
    return {
        f"{name} {percent}, ms": 1e3 * values[min(len(values) * at // 100, len(values) - 1)]
        for name, values in (("first token", first), ("between tokens", gaps))
        for percent, at in (("p50", 50), ("p95", 95))
        if values
    }


WORKLOADS = (
    Workload("W1", "64 in, 128 out, one stream", "output tokens/s", True, 1.7, _one_stream),
    Workload("W2", "64 in, 128 out, 16 streams", "output tokens/s", True, 2.0, _sixteen_streams),
    Workload("W3", "1,500 in (distinct), 16 out, one stream", "prompt tokens/s", True, 1.3, _prefill),
    Workload("W4", "32 x (1,200 shared + 64 in, 32 out), 8 streams", "seconds", False, 2.5, _shared_prefix),
    Workload("W5", "8 conversations x 6 turns, history sent again", "seconds", False, 2.2, _conversations),
)
