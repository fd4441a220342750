"""Runs a load on any OpenAI-compatible server, measured at the client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from freehold.bench.load import Load, Planned


@dataclass
class Sample:
    """One request as seen by its client, in seconds."""

    first_token: float = 0.0  # since it was due
    gaps: list[float] = field(default_factory=list[float])
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def per_token(self) -> float:
        """Mean time of an output token after the first."""
        return sum(self.gaps) / max(self.output_tokens - 1, 1)

    @property
    def total(self) -> float:
        return self.first_token + sum(self.gaps)


@dataclass(frozen=True)
class Measured:
    seconds: float
    samples: list[Sample]

    @property
    def good(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.error is None]


async def measure(url: str, load: Load, on_progress: Callable[[int], None] = lambda done: None) -> Measured:
    """Send the load. Time that a due request waits to be sent counts."""
    limits = httpx.Limits(max_connections=load.concurrency)
    gate = contextlib.nullcontext() if load.concurrency is None else asyncio.Semaphore(load.concurrency)
    done = 0
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        started = time.monotonic()

        async def one(planned: Planned) -> Sample:
            nonlocal done
            await asyncio.sleep(planned.at - (time.monotonic() - started))
            async with gate:
                late = time.monotonic() - started - planned.at if planned.at else 0.0
                sample = await complete(client, model, planned.prompt, planned.output_len)
            sample.first_token += late
            done += 1
            on_progress(done)
            return sample

        samples = await asyncio.gather(*(one(planned) for planned in load.requests))
        return Measured(time.monotonic() - started, list(samples))


async def complete(client: httpx.AsyncClient, model: str, prompt: list[int] | str, output_len: int) -> Sample:
    """Request exactly `output_len` tokens, greedily."""
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
