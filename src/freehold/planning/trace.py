"""Traces of real services as workloads: arrivals, lengths, and shared prefixes.

| format | rows | prefix identity |
|---|---|---|
| Mooncake | JSON lines with timestamp (ms), input_length, output_length, hash_ids | 512 tokens a block |
| agent sessions | JSON lines with requests[] of t (s), in, out, hash_ids | 64 tokens a block, local to a session |
| Azure | CSV TIMESTAMP, ContextTokens, GeneratedTokens | none |

Lengths and blocks are divided by `scale`, which preserves the reuse graph. Times in a session are relative to it, so
sessions are given random starts within four hours.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from freehold.contract.arrays import Int32

TOKEN_SPACE = 1 << 30
MOONCAKE_BLOCK = 512
SESSION_BLOCK = 64
SESSIONS_START_WITHIN_S = 4 * 3600.0
FORMATS = (
    "A trace has rows of JSON with timestamp, input_length, output_length and hash_ids, or with requests of t, in, out "
    "and hash_ids; or it is a .csv with TIMESTAMP, ContextTokens and GeneratedTokens"
)


@dataclass(frozen=True)
class Arrival:
    """A request of a trace: `at` seconds from its start, prompt tokens int32 [n]."""

    at: float
    prompt: Int32
    output_length: int


def read_trace(path: Path, scale: int) -> list[Arrival]:
    """Return all requests by time of arrival. Raise ValueError for an unknown format."""
    with _open(path) as file:
        try:
            arrivals = list(_azure(file, scale) if ".csv" in path.suffixes else _json_lines(file, scale))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            said = f"there is no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"trace: {path.name} has an unknown format ({said}). {FORMATS}") from error
    if not arrivals:
        raise ValueError(f"trace: {path.name} has no requests")
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _json_lines(file: TextIO, scale: int) -> Iterator[Arrival]:
    starts = random.Random(0)
    for number, row in enumerate(json.loads(line) for line in file if line.strip()):
        if "requests" in row:
            yield from _session(row, number, starts.random() * SESSIONS_START_WITHIN_S, scale)
        else:
            yield _mooncake(row, scale)


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8", newline="\n")
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise ValueError(
                f"trace: {path.name} needs the zstandard package: pip install 'freehold[traces]'"
            ) from None
        return io.TextIOWrapper(zstandard.open(path, "rb"), encoding="utf-8", newline="\n")
    return path.open(encoding="utf-8", newline="\n")


def _tokens(ids: list[int], block: int, length: int, salt: int, unique: int) -> Int32:
    """Return tokens that are equal where block ids are. Tokens not covered by ids are unique."""
    covered = min(len(ids) * block, length)
    keys = np.repeat(np.array(ids, np.int64) * 1_000_003 + salt * 7_919, block)[:covered]
    shared = (keys * 31 + np.arange(covered) % block * 2_654_435_761) % TOKEN_SPACE
    rest = (unique * 1_000_003 + np.arange(length - covered) * 97 + 13) % TOKEN_SPACE
    return np.concatenate([shared, rest]).astype(np.int32)


def _mooncake(row: dict[str, Any], scale: int) -> Arrival:
    length = max(row["input_length"] // scale, 1)
    block = max(MOONCAKE_BLOCK // scale, 1)
    tokens = _tokens(row["hash_ids"], block, length, 0, row["timestamp"])
    return Arrival(row["timestamp"] / 1000, tokens, max(row["output_length"] // scale, 1))


def _session(row: dict[str, Any], number: int, start: float, scale: int) -> Iterator[Arrival]:
    block = max(SESSION_BLOCK // scale, 1)
    for i, request in enumerate(row["requests"]):
        at = start + float(request.get("t", 0.0))
        if request.get("type") == "subagent":
            yield from _session(request, number, at, scale)
            continue
        length = max(int(request["in"]) // scale, 1)
        tokens = _tokens(request.get("hash_ids", []), block, length, number + 1, number * 100_000 + i)
        yield Arrival(at, tokens, max(int(request["out"]) // scale, 1))


def _azure(file: TextIO, scale: int) -> Iterator[Arrival]:
    start: datetime | None = None
    for number, row in enumerate(csv.DictReader(file)):
        when = datetime.fromisoformat(row["TIMESTAMP"][:26])
        start = start or when
        length = max(int(row["ContextTokens"]) // scale, 1)
        tokens = _tokens([], 1, length, 0, number)
        yield Arrival((when - start).total_seconds(), tokens, max(int(row["GeneratedTokens"]) // scale, 1))
