"""A comparison's results as a table and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freehold.bench.peers.result import Result
from freehold.bench.workloads import Workload


def markdown(machine: str, rounds: int, workloads: Sequence[Workload], results: Sequence[Result]) -> tuple[str, bool]:
    """Return the table, and whether the first result, which is ours, meets all goals."""
    names = [f"{result.name} ({result.precision})" for result in results]
    ours = [result for result in results if result.is_ours]
    over = [f"{result.name} over the best peer" for result in ours]
    lines = [
        f"{machine}; medians of {rounds} interleaved rounds, and the least and most of them.",
        "",
        f"| | {' | '.join([*names, *over])} | goal |",
        "|---" * (len(names) + len(over) + 2) + "|",
    ]
    is_met = True
    for workload in workloads:
        ratios = [_ratio(workload, result, results) for result in ours]
        is_met = is_met and (ratios[0] is None or ratios[0] >= workload.goal)
        cells = [_with_spread(result, workload) for result in results]
        cells += ["" if ratio is None else f"**{ratio:.2f} x**" for ratio in ratios]
        lines.append(f"| {workload.name}: {workload.what}, {workload.unit} | {' | '.join(cells)} | {workload.goal} x |")
        for key in results[0].figures[workload.name]:
            if key != workload.unit:
                cells = [f"{result.figures[workload.name].get(key, float('nan')):.0f}" for result in results]
                lines.append(f"| {key} | {' | '.join(cells)} |{' |' * len(over)} |")
    for what, cells in (
        ("peak memory, GB", [f"{result.peak_memory_gb:.2f}" for result in results]),
        ("cores busy", [f"{result.cpu:.1f}" for result in results]),
        ("start, s", [f"{result.start_seconds:.0f}" for result in results]),
    ):
        lines.append(f"| {what} | {' | '.join(cells)} |{' |' * len(over)} |")
    return "\n".join(lines) + "\n", is_met


def _with_spread(result: Result, workload: Workload) -> str:
    low, high = result.spread[workload.name][workload.unit]
    return f"{result.figures[workload.name][workload.unit]:.1f} ({low:.1f} to {high:.1f})"


def _ratio(workload: Workload, result: Result, results: Sequence[Result]) -> float | None:
    """Return the ratio to the best peer, if there are any."""
    value = result.figures[workload.name][workload.unit]
    peers = [one.figures[workload.name][workload.unit] for one in results if not one.is_ours]
    if not peers:
        return None
    return value / max(peers) if workload.more_is_better else min(peers) / value


def plot(path: Path, workloads: Sequence[Workload], results: Sequence[Result]) -> None:
    """Plot bars, one group per workload: speed over the slowest. Do nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(2 * len(workloads) + 2, 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(results)
    for i, result in enumerate(results):
        heights: list[float] = []
        for workload in workloads:
            values = [one.figures[workload.name][workload.unit] for one in results]
            value = result.figures[workload.name][workload.unit]
            heights.append(value / min(values) if workload.more_is_better else max(values) / value)
        axes.bar([j + i * width for j in range(len(workloads))], heights, width, label=result.name)
    axes.set_xticks([j + 0.4 - width / 2 for j in range(len(workloads))], [one.name for one in workloads])
    axes.set_ylabel("speed over the slowest")
    axes.legend()
    figure.savefig(path, dpi=120)
