"""What one engine achieved."""

from __future__ import annotations

from dataclasses import dataclass

from freehold.bench.workloads import Figures


@dataclass(frozen=True)
class Result:
    """Medians over the rounds of one engine, and the least and most. `cpu`: cores busy on average while it was
    measured."""

    name: str
    precision: str
    figures: dict[str, Figures]
    spread: dict[str, dict[str, tuple[float, float]]]
    peak_memory_gb: float
    cpu: float
    start_seconds: float
    is_ours: bool = False
