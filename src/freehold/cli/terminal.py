"""What the command line shows: conversations, completions, memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from freehold.contract.sampling_params import SamplingParams
from freehold.llm import LLM
from freehold.runtime.memory_plan import MemoryPlan

console = Console(highlight=False)


def generate_all(llm: LLM, prompts: list[str], max_tokens: int, temperature: float) -> None:
    texts = [line for text in sys.stdin if (line := text.rstrip("\n"))] if prompts == ["-"] else prompts
    columns = (TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(texts))
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        outputs = llm.generate(texts, params, lambda finished: progress.update(task, completed=finished))
    for text, output in zip(texts, outputs, strict=True):
        console.out(text, style="bold", end="")
        console.out(output.text)
        console.print(
            f"[dim]{output.finish_reason} · {len(output.token_ids)} tokens · "
            f"{output.cached_tokens} of {output.prompt_tokens} prompt tokens cached[/dim]"
        )


def show_memory(report: dict[str, Any]) -> None:
    """Show the answer of /debug/memory."""
    if "explanation" in report:
        console.print(report["explanation"], markup=False, soft_wrap=True)
        return
    groups = report["groups"]
    table = Table("pages", title=f"KV memory, {report['page_size']} tokens a page")
    for number, group in enumerate(groups):
        table.add_column("count" if len(groups) == 1 else f"{number}: {group['name']}", justify="right")
    for owner in report["pages"]:
        table.add_row(owner, *(str(group["pages"][owner]) for group in groups))
    console.print(table)
    columns = ("request", "state", "row", "shared", "committed", "allocated", "pages")
    leases = Table(*columns, title=f"{len(report['leases'])} leases, {report['waiting']} requests waiting")
    for lease in report["leases"]:
        leases.add_row(*(str(lease[name]) for name in columns))
    console.print(leases)
    if "tiers" in report:
        show_tiers(report["tiers"])


def show_tiers(tiers: dict[str, Any]) -> None:
    """Host pages by owner, and what was copied between tiers."""
    groups = tiers["host_pages"]
    host = Table("host pages", *groups, title="Host memory")
    for owner in next(iter(groups.values())):
        host.add_row(owner, *(str(counts[owner]) for counts in groups.values()))
    console.print(host)
    copies = Table("transfers", "in flight", "ended", "failed", "ms each", "pages", "queued", title="Between tiers")
    for kind, counts in tiers["transfers"].items():
        each = 1000 * counts["seconds"] / counts["ended"] if counts["ended"] else 0.0
        pages, queued = tiers["moved_pages"].get(kind, ""), tiers["queued_pages"].get(kind, "")
        numbers = (str(counts[name]) for name in ("in_flight", "ended", "failed"))
        copies.add_row(kind, *numbers, f"{each:.1f}", str(pages), str(queued))
    console.print(copies)
    lost = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in tiers["lost_pages"].items() if count)
    console.print(f"pages not copied: {lost or 'none'}")


def show_answer(body: dict[str, Any]) -> None:
    """Names and values, one a line."""
    table = Table(show_header=False, box=None)
    for name, value in body.items():
        shown = ", ".join(f"{key} {part}" for key, part in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name.replace("_", " "), shown)
    console.print(table, highlight=False, markup=False)


def show_plan(plan: MemoryPlan, host_counts: Sequence[int], sources: Mapping[str, str]) -> None:
    """Show a memory plan, and which options were given where. `host_counts`: pages of each cache group,
    none without a host tier."""
    shape, spec = plan.shape, plan.spec
    tokens = shape.page_count * shape.page_size
    table = Table(title="Memory plan", show_header=False)
    table.add_row("model", f"{plan.path.name} ({spec.architecture}, {spec.layer_count} layers)")
    total = sum(count * cost for count, cost in zip(shape.page_counts, plan.page_bytes, strict=True))
    table.add_row("KV memory", f"{total / 2**20:,.1f} MiB, {plan.config.kv_cache_dtype}")
    for group, count, cost in zip(shape.groups, shape.page_counts, plan.page_bytes, strict=True):
        name = "pages" if len(shape.groups) == 1 else f"pages, {group.name}"
        table.add_row(name, f"{count:,} of {shape.page_size} tokens, {cost:,} bytes each")
    table.add_row("capacity", f"{tokens:,} tokens")
    if host_counts:
        size = sum(count * cost for count, cost in zip(host_counts, plan.page_bytes, strict=True))
        table.add_row(
            "host memory", f"{size / 2**20:,.1f} MiB, {' and '.join(f'{count:,}' for count in host_counts)} pages"
        )
    if plan.config.hicache_storage_backend is not None:
        limit = plan.config.hicache_storage_capacity / 2**30
        table.add_row("storage", f"{plan.config.hicache_storage_backend}, {limit:,.1f} GiB at most")
    table.add_row("longest request", f"{min(shape.token_limit, tokens + 1):,} tokens, prompt and output")
    table.add_row("batch", f"{shape.row_count:,} requests at most")
    for name, share in (("hints may retain", shape.retained_share), ("operators may pin", shape.pinned_share)):
        table.add_row(name, f"{shape.pages(share):,} pages")
    console.print(table)
    for name, source in sources.items():
        if source != "default" and hasattr(plan.config, name):
            console.print(f"{name} = {getattr(plan.config, name)} (from {source})")
    if shape.token_limit > tokens:
        console.print(f"[yellow]The context of {shape.token_limit:,} tokens is longer than the pool.[/yellow]")
