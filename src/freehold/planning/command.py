"""`freehold simulate --trace`: how a server of a given size would handle a trace."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from freehold.config import EngineConfig
from freehold.planning.evictions import hit_rates
from freehold.planning.replay import Replay, Speed, percentile, replay
from freehold.planning.trace import read_trace

console = Console()
BAR = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def simulate_trace(path: Path, scale: int, limit: int | None, config: EngineConfig, speed: Speed) -> int:
    """Replay a trace on a server of this size, and print the result."""
    arrivals = read_trace(path, scale)[:limit]
    with Progress(*BAR, console=console, transient=True) as progress:
        task = progress.add_task("requests", total=len(arrivals))
        result = replay(arrivals, config, speed, lambda ended: progress.update(task, completed=ended))
    _show_replay(result)
    with console.status("Comparing eviction policies ..."):
        policies = dict.fromkeys(["lru", "lfu", config.eviction_policy])
        host = config.hicache_ratio if config.enable_hierarchical_cache else 0
        pages = int((config.num_pages or 0) * (1 + host))
        rates = hit_rates(arrivals, config.page_size, pages, list(policies))
    title = f"eviction alone, {pages:,} pages"
    table = Table("policy", "hit rate", "of the gap between lru and the optimum", title=title)
    room = max(rates["optimum"] - rates["lru"], 1e-9)
    for name, rate in rates.items():
        table.add_row(name, f"{rate:.3f}", f"{(rate - rates['lru']) / room:.0%}")
    console.print(table)
    return 0


def _show_replay(result: Replay) -> None:
    table = Table("s", "running", "waiting", "free", "leased", "pinned", "evictable", title="memory over time, pages")
    for when, pages, running, waiting in result.memory:
        owners = (str(pages[name]) for name in ("free", "lease", "pinned", "tree"))
        table.add_row(f"{when:.0f}", str(running), str(waiting), *owners)
    console.print(table)
    console.print(
        f"{result.requests:,} requests ({result.refused} refused), {result.steps:,} steps, "
        f"{result.duration:,.0f} s simulated\n"
        f"queued p50 {percentile(result.queued, 50):.2f} s, p99 {percentile(result.queued, 99):.2f} s; "
        f"first token p50 {percentile(result.first_token, 50):.2f} s, p99 {percentile(result.first_token, 99):.2f} s\n"
        f"hit rate {result.hit_rate:.3f} ({result.cached_tokens:,} of {result.prompt_tokens:,} prompt tokens: "
        f"{', '.join(f'{count:,} {tier}' for tier, count in result.cached_by_tier.items())}), "
        f"{result.retractions:,} retractions, {result.evicted_pages:,} pages evicted",
        highlight=False,
        soft_wrap=True,
    )
