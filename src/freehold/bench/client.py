"""A closed-loop load on any OpenAI-compatible server, measured at the client."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True)
class Load:
    """`shared_prefix` is the share of each prompt that all have in common."""

    concurrency: int
    num_prompts: int
    input_len: int
    output_len: int
    shared_prefix: float
    seed: int = 0

    def prompts(self, vocab_size: int = 20_000) -> list[list[int]]:
        """Token ids, reproducible."""
        rng = random.Random(self.seed)
        common = int(self.input_len * self.shared_prefix)

        def tokens(count: int) -> list[int]:
            return [rng.randrange(1000, vocab_size) for _ in range(count)]

        prefix = tokens(common)
        return [prefix + tokens(self.input_len - common) for _ in range(self.num_prompts)]


@dataclass
class Sample:
    """One request as its client saw it; seconds."""

    first_token: float = 0.0
    gaps: list[float] = field(default_factory=list[float])
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Measured:
    load: Load
    seconds: float
    samples: list[Sample]

    @property
    def good(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.error is None]


async def measure(url: str, load: Load, on_progress: Callable[[int], None] = lambda done: None) -> Measured:
    """Send the load, `concurrency` requests at a time."""
    limits = httpx.Limits(max_connections=load.concurrency)
    gate = asyncio.Semaphore(load.concurrency)
    done = 0
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def one(prompt: list[int]) -> Sample:
            nonlocal done
            async with gate:
                sample = await complete(client, model, prompt, load.output_len)
            done += 1
            on_progress(done)
            return sample

        started = time.monotonic()
        samples = await asyncio.gather(*(one(prompt) for prompt in load.prompts()))
        return Measured(load, time.monotonic() - started, list(samples))


async def complete(client: httpx.AsyncClient, model: str, prompt: list[int] | str, output_len: int) -> Sample:
    """Exactly `output_len` tokens, greedily."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output_len,
        "min_tokens": output_len,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sample = Sample()
    last = started = time.monotonic()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                sample.error = (await response.aread()).decode(errors="replace")[:200]
                return sample
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event, now = json.loads(line[6:]), time.monotonic()
                if event.get("usage"):
                    _take_usage(sample, event["usage"])
                if event.get("choices"):
                    sample.text += event["choices"][0].get("text") or ""
                    if sample.first_token:
                        sample.gaps.append(now - last)
                    else:
                        sample.first_token = now - started
                    last = now
    except httpx.HTTPError as error:
        sample.error = f"{type(error).__name__}: {error}"
    return sample


def _take_usage(sample: Sample, usage: dict[str, Any]) -> None:
    sample.prompt_tokens = usage["prompt_tokens"]
    sample.output_tokens = usage["completion_tokens"]
    sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
