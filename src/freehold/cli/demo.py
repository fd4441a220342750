"""`make demo`: a real server, several streaming clients at once, and an account of every page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel

from freehold.server.child import running_server

SYSTEM = (
    "You are a friendly assistant of a small library. You answer in at most three short sentences, in plain words, "
    "and you never invent opening hours. The library is open from nine to five, it lends books, films and games, and "
    "it has a reading room with a view of the river."
)
QUESTIONS = (
    "What can I borrow here?",
    "When are you open?",
    "Tell me about the reading room.",
    "What is the capital of France?",
    "Write one sentence about rivers.",
    "Why do people read books?",
)

console = Console(highlight=False)


def run_demo() -> int:
    """-> the exit code: 0 if prefixes were shared and all memory is accounted for."""
    console.print("[bold]Freehold[/bold]: starting a server with the bundled model ...")
    started = time.monotonic()
    with running_server("--max-model-len", "2048") as url:
        console.print(f"Ready after {time.monotonic() - started:.1f} s at {url}\n")
        warm = asyncio.run(_round(url, QUESTIONS[:1], "One client first: it computes the prompt they all share."))
        rest = asyncio.run(_round(url, QUESTIONS, f"Now {len(QUESTIONS)} clients at once."))
        memory = httpx.get(f"{url}/debug/memory", timeout=30).json()
        ok = _report([*warm, *rest], memory)
    console.print("The server has stopped.")
    return 0 if ok else 1


async def _round(url: str, questions: tuple[str, ...], title: str) -> list[dict[str, Any]]:
    """Ask all questions at once, showing the answers as they stream -> usages."""
    answers = [""] * len(questions)
    console.print(f"[bold]{title}[/bold]")

    def screen() -> Group:
        pairs = zip(questions, answers, strict=True)
        return Group(*(Panel(answer, title=question, title_align="left") for question, answer in pairs))

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        with Live(screen(), console=console, refresh_per_second=8) as live:

            async def ask(index: int) -> dict[str, Any]:
                async for text, usage in _stream(client, questions[index]):
                    answers[index] += text
                    live.update(screen())
                    if usage:
                        return usage
                raise RuntimeError("the stream ended without usage")

            usages = await asyncio.gather(*(ask(i) for i in range(len(questions))))
    console.print()  # a display that is not a terminal leaves its last line open
    return list(usages)


async def _stream(client: httpx.AsyncClient, question: str) -> AsyncIterator[tuple[str, dict[str, Any] | None]]:
    """-> (text, usage or None) for each event."""
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 60,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                text = event["choices"][0]["delta"].get("content", "") if event["choices"] else ""
                yield text, event.get("usage")


def _report(usages: list[dict[str, Any]], memory: dict[str, Any]) -> bool:
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    hits = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    pages = memory["pages"]
    free, capacity = pages["free"], pages["capacity"]
    held = sum(count for owner, count in pages.items() if owner not in ("free", "capacity"))
    console.print()
    console.print(f"Prompt tokens: {prompt}, of which found in the prefix cache: {hits} ({hits / prompt:.0%})")
    console.print(f"Pages: free {free} + held {held} == capacity {capacity}: {free + held == capacity}")
    holders = ", ".join(f"{owner} {count}" for owner, count in pages.items() if owner not in ("free", "capacity"))
    console.print(f"Held by: {holders}; leases still open: {len(memory['leases'])}")
    return hits > 0 and free + held == capacity and not memory["leases"]
