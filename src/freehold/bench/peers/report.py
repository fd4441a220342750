"""Results of a comparison as a table and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freehold.bench.peers.result import Result
from freehold.bench.workloads import Workload


def markdown(machine: str, rounds: int, workloads: Sequence[Workload], results: Sequence[Result]) -> tuple[str, bool]:
    """-> the table, and whether all goals are met. The first result is ours."""
    ours, peers = results[0], results[1:]
    names = [f"{result.name} ({result.precision})" for result in results]
    lines = [
        f"{machine}; medians of {rounds} interleaved rounds.",
        "",
        f"| | {' | '.join(names)} | over the best peer | goal |",
        "|---" * (len(results) + 3) + "|",
    ]
    is_met = True
    for workload in workloads:
        values = [result.figures[workload.name][workload.unit] for result in results]
        ratio = _ratio(workload, values) if peers else None
        is_met = is_met and (ratio is None or ratio >= workload.goal)
        shown = "" if ratio is None else f"**{ratio:.2f} x**"
        cells = " | ".join(f"{value:.1f}" for value in values)
        lines.append(f"| {workload.name}: {workload.what}, {workload.unit} | {cells} | {shown} | {workload.goal} x |")
        for key in ours.figures[workload.name]:
            if key != workload.unit:
                cells = " | ".join(f"{result.figures[workload.name].get(key, float('nan')):.0f}" for result in results)
                lines.append(f"| {key} | {cells} | | |")
    for what, cells in (
        ("peak memory, GB", [f"{result.peak_memory_gb:.2f}" for result in results]),
        ("cores busy", [f"{result.cpu:.1f}" for result in results]),
        ("start, s", [f"{result.start_seconds:.0f}" for result in results]),
    ):
        lines.append(f"| {what} | {' | '.join(cells)} | | |")
    return "\n".join(lines) + "\n", is_met


def _ratio(workload: Workload, values: Sequence[float]) -> float:
    """How many times better than the best of the others."""
    if workload.more_is_better:
        return values[0] / max(values[1:])
    return min(values[1:]) / values[0]


def plot(path: Path, workloads: Sequence[Workload], results: Sequence[Result]) -> None:
    """Bars, one group for each workload: speed over the slowest. Nothing without matplotlib."""
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
