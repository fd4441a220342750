"""The cost of constrained output: streams, masks, forced tokens, other clients, memory; interleaved in one run."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from freehold.contract.constraint import Constraint
from freehold.contract.sampling_params import SamplingParams
from freehold.engine.grammar.compiler import Grammars
from freehold.llm import LLM
from freehold.server.child import running_server

ROUNDS = 5
STREAMS = 16
SCHEMAS = 200
COMPILED = 10_000
QUIET_S = 10.0

REFERENCE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "email": {"type": "string", "format": "email"},
        "created": {"type": "string", "format": "date-time"},
        "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "status": {"enum": ["active", "paused", "closed"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "orders": {
            "type": "array",
            "minItems": 2,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "maxLength": 12},
                    "count": {"type": "integer", "maximum": 99},
                },
                "required": ["item", "count"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "name", "email", "created", "code", "status", "age", "orders"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": r"[ \n\t]{1,8}"},
}
PROMPT = "A customer of the shop, as JSON, with all fields:\n"
ATTACKS = ["((a{100}){100}){100}", "a{100000}", "[^x]*a[^x]{200}", "(abc){1000,2000}", "[a-zA-Z ]{1,2000}"]

_Row = tuple[str, str, str, bool]


def run_structured() -> int:
    """Print figures beside their goals. Return exit code 0 if all are met."""
    console = Console()
    with console.status("Measuring, a few minutes ..."):
        rows = [*_offline(), _memory(), *asyncio.run(_gaps())]
    table = Table("", "measured", "goal", title="Constrained output")
    for name, measured, goal, is_met in rows:
        table.add_row(name, measured, goal, style=None if is_met else "red")
    console.print(table)
    return 0 if all(is_met for *_, is_met in rows) else 1


def _bound(number: int = 0) -> Constraint:
    schema = REFERENCE if not number else {**REFERENCE, "title": f"schema {number}"}
    return Constraint(f"start: %json {json.dumps(schema)}", "json_schema")


def _offline() -> list[_Row]:
    bound = SamplingParams(temperature=0, max_tokens=300, constraint=_bound())
    with LLM(disable_forced_tokens=True) as plain, LLM() as forced:
        for llm in (plain, forced):
            llm.generate([PROMPT], bound)
        prompts = [f"{i}. {PROMPT}" for i in range(STREAMS)]
        lengths = [len(one.token_ids) for one in plain.generate(prompts, bound)]
        free = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
        many = _ratio(lambda: plain.generate(prompts, bound), lambda: plain.generate(prompts, free))
        alone = _ratio(lambda: forced.generate([PROMPT], bound), lambda: plain.generate([PROMPT], bound))
        (output,) = plain.generate([PROMPT], bound)
        masks = _mask_times(plain, output.token_ids)
    half, most = np.percentile(masks, [50, 99])
    return [
        (f"{STREAMS} bound streams, speed beside the same unbound", f"{many:.3f} x", ">= 0.97 x", many >= 0.97),
        ("forced tokens, one stream, beside none", f"{alone:.2f} x", ">= 1.2 x", alone >= 1.2),
        ("a mask, median", f"{half:.0f} us", "<= 50 us", half <= 50),
        ("a mask, 99th percentile", f"{most:.0f} us", "<= 500 us", most <= 500),
    ]


def _ratio(one: Callable[[], object], other: Callable[[], object]) -> float:
    """Return how much faster the first is than the other, median of alternating rounds."""
    found: list[float] = []
    for _ in range(ROUNDS):
        seconds: list[float] = []
        for run in (one, other):
            before = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - before)
        found.append(seconds[1] / seconds[0])
    return statistics.median(found)


def _mask_times(llm: LLM, tokens: list[int]) -> list[float]:
    """Return CPU microseconds of the mask before each token, with fresh matchers."""
    grammar = _grammars(llm).result(_bound())
    words = np.zeros(-(-len(llm.tokenizer.pieces) // 32), np.uint32)
    found: list[float] = []
    for _ in range(ROUNDS):
        matcher = grammar.matcher()
        for token in tokens:
            before = time.thread_time()
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            found.append((time.thread_time() - before) * 1e6)
            if token in llm.tokenizer.eos_tokens:
                break
            matcher.try_consume_tokens([token])
    return found


def _grammars(llm: LLM) -> Grammars:
    return Grammars(llm.tokenizer, len(llm.tokenizer.pieces), 5.0, 64 << 20)


def _memory() -> _Row:
    with LLM(num_pages=100) as llm:
        grammars = _grammars(llm)
        grammars.result(_bound())
        before = _resident()
        for number in range(1, COMPILED + 1):
            grammars.result(_bound(number))
        grown = (_resident() - before) / 1e6
    return f"memory after {COMPILED:,} schemas", f"+{grown:.0f} MB", "<= 150 MB", grown <= 150


def _resident() -> int:
    """Return the process's resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def _gaps() -> list[_Row]:
    """Measure token gaps of an unconstrained stream, quiet and while others send schemas and attacks."""
    with running_server() as url:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            await _stream(client, 1.0)
            quiet = np.array(await _stream(client, QUIET_S))
            others = asyncio.create_task(_load(client))
            busy = np.array(await _stream(client, 3 * QUIET_S))
            await others
    ratio = float(np.percentile(busy, 99) / np.percentile(quiet, 99))
    return [
        ("99th percentile of gaps, beside quiet", f"{ratio:.2f} x", "<= 1.2 x", ratio <= 1.2),
        ("longest gap", f"{busy.max() * 1e3:.0f} ms", "<= 100 ms", bool(busy.max() <= 0.1)),
    ]


async def _stream(client: httpx.AsyncClient, seconds: float) -> list[float]:
    gaps: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        body = {"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            last = None
            async for line in answer.aiter_lines():
                now = time.perf_counter()
                if not line.startswith("data: {"):
                    continue
                if last is not None:
                    gaps.append(now - last)
                last = now
                if now > end:
                    break
    return gaps


async def _load(client: httpx.AsyncClient) -> None:
    """Send requests one by one, each compiling a grammar and generating one token."""
    for number in range(SCHEMAS):
        form = {"json_schema": {**REFERENCE, "title": f"other {number}"}}
        if number % 10 == 0:
            form = {"regex": ATTACKS[number // 10 % len(ATTACKS)]}
        await client.post("/v1/completions", json={"prompt": "JSON:", "max_tokens": 1, **form})
