"""A benchmark's requests and their times: as fast as answers arrive, at a rate, or from a trace."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from pathlib import Path

from freehold.planning.trace import read_trace

VOCABULARY = range(1000, 20_000)  # ordinary tokens in every model


@dataclass(frozen=True)
class Planned:
    """A request, due `at` seconds after the start."""

    prompt: list[int]
    output_len: int
    at: float = 0.0


@dataclass(frozen=True)
class Load:
    """At most `concurrency` requests are in flight; None: each is sent when due, regardless of others."""

    requests: list[Planned]
    concurrency: int | None

    @classmethod
    def random(
        cls, concurrency: int | None, count: int, input_len: int, output_len: int, shared_prefix: float, seed: int = 0
    ) -> Load:
        """Return prompts of random tokens with a common share `shared_prefix`."""
        rng = random.Random(seed)
        common = int(input_len * shared_prefix)
        prefix = rng.choices(VOCABULARY, k=common)
        prompts = (prefix + rng.choices(VOCABULARY, k=input_len - common) for _ in range(count))
        return cls([Planned(prompt, output_len) for prompt in prompts], concurrency)

    @classmethod
    def trace(cls, path: Path, scale: int, speed: float, limit: int | None) -> Load:
        """Return the first `limit` requests of a trace, with lengths divided by `scale`, `speed` times as fast. Equal
        blocks of the trace become equal tokens. Raises ValueError for an unknown format."""
        arrivals = read_trace(path, scale)[:limit]
        if not arrivals:
            raise ValueError(f"trace: {path.name} has no requests")
        start, first, size = arrivals[0].at, VOCABULARY.start, len(VOCABULARY)
        return cls(
            [
                Planned((first + one.prompt % size).tolist(), one.output_length, (one.at - start) / speed)
                for one in arrivals
            ],
            None,
        )

    def at_rate(self, rate: float, seed: int = 0) -> Load:
        """Return the same requests at random times, on average `rate` per second (a Poisson process)."""
        rng = random.Random(seed)
        due = itertools.accumulate((rng.expovariate(rate) for _ in self.requests), initial=0.0)
        return replace(self, requests=[replace(one, at=at) for one, at in zip(self.requests, due, strict=False)])
