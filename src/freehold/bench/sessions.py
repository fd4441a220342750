"""The costs and savings of sessions: a turn's first token, and many parked sessions on little memory."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.table import Table

from freehold.contract.arrays import Int32
from freehold.contract.sampling_params import SamplingParams
from freehold.llm import LLM
from freehold.scheduler.request import Request
from freehold.server.sessions.conversation import Conversation

CONTEXT, TURN = 1500, 32
ROUNDS = 7
SESSIONS, POOL_SESSIONS = 2000, 50
HISTORY, NEW, OUTPUT = 24, 8, 2
GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class _Client:
    """Submits requests to one engine and waits for them."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._number = 0
        self.rng = np.random.default_rng(0)

    def tokens(self, count: int) -> Int32:
        return self.rng.integers(1000, 40_000, count, np.int32)

    def submit(self, prompt: Int32, count: int, session: str | None = None) -> Request:
        self._number += 1
        params = replace(GREEDY, max_tokens=count)
        request = Request(f"b{self._number}", prompt, params, session=session)
        self._llm.scheduler.add(request)
        return request

    def finish(self) -> None:
        while self._llm.scheduler.has_work:
            self._llm.scheduler.step()

    def first_token_seconds(self, prompt: Int32, session: str | None = None) -> float:
        started = time.perf_counter()
        self.submit(prompt, 1, session)
        self.finish()
        return time.perf_counter() - started


def run_sessions() -> int:
    """Print ratios. Return exit code 0 if the goals are met."""
    console = Console()
    with console.status("Measuring, a few minutes ..."):
        with LLM(max_running_requests=16) as llm:
            turn, cached, cold = _first_tokens(_Client(llm))
        with_sessions = _throughput(sessions=True)
        without = _throughput(sessions=False)
    table = Table("what", "measured", "goal", title="Sessions")
    table.add_row(f"first token of a turn of {TURN} on {CONTEXT} tokens", f"{1000 * turn:.0f} ms", "")
    table.add_row("the same after an equal context in the cache", f"{1000 * cached:.0f} ms", "")
    table.add_row("ratio", f"{turn / cached:.2f} x", "<= 1.15 x")
    table.add_row("without reuse, over a turn", f"{cold / turn:.1f} x", ">= 5 x")
    table.add_row(f"{SESSIONS} sessions on a pool for {POOL_SESSIONS}, turns a second", f"{with_sessions:.1f}", "")
    table.add_row("the same load without sessions", f"{without:.1f}", "")
    table.add_row("ratio", f"{with_sessions / without:.2f} x", ">= 0.9 x")
    console.print(table)
    return 0 if turn <= 1.15 * cached and cold >= 5 * turn and with_sessions >= 0.9 * without else 1


def _first_tokens(client: _Client) -> tuple[float, float, float]:
    """Return medians, measured interleaved."""
    turns: list[float] = []
    cached: list[float] = []
    cold: list[float] = []
    for number in range(ROUNDS + 1):
        conversation = Conversation()
        whole = conversation.begin(client.tokens(CONTEXT))
        request = client.submit(whole, 1, f"s{number}")
        client.finish()
        conversation = conversation.after(whole, request.output.tolist())
        context = client.tokens(CONTEXT)
        client.first_token_seconds(context)
        new = client.tokens(TURN)
        measured = (
            client.first_token_seconds(conversation.begin(new), f"s{number}"),
            client.first_token_seconds(np.concatenate([context, new])),
            client.first_token_seconds(client.tokens(CONTEXT + TURN)),
        )
        if number:  # the first round warms up
            for series, seconds in zip((turns, cached, cold), measured, strict=True):
                series.append(seconds)
    return statistics.median(turns), statistics.median(cached), statistics.median(cold)


def _throughput(sessions: bool) -> float:
    """Return turns per second: a first, then a second turn of all sessions, 16 at once."""
    pages = POOL_SESSIONS * (-(-(HISTORY + NEW + 2 * OUTPUT) // 16) + 1)
    with LLM(max_running_requests=16, num_pages=pages) as llm:
        client = _Client(llm)
        conversations = [Conversation() for _ in range(SESSIONS)]
        client.first_token_seconds(client.tokens(HISTORY))
        started, count = time.perf_counter(), 0
        for length in (HISTORY, NEW):
            for first in range(0, SESSIONS, 16):
                batch = range(first, first + 16)
                wholes = [conversations[i].begin(client.tokens(length)) for i in batch]
                requests = [
                    client.submit(whole, OUTPUT, f"s{i}" if sessions else None)
                    for i, whole in zip(batch, wholes, strict=True)
                ]
                client.finish()
                for i, whole, request in zip(batch, wholes, requests, strict=True):
                    conversations[i] = conversations[i].after(whole, request.output.tolist())
                    count += 1
        llm.scheduler.audit()
        return count / (time.perf_counter() - started)
