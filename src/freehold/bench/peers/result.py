"""The results of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from freehold.bench.workloads import Figures


@dataclass(frozen=True)
class Result:
    """Medians over an engine's rounds, and their range. `cpu`: average busy cores while measured."""

    name: str
    precision: str
    figures: dict[str, Figures]
    spread: dict[str, dict[str, tuple[float, float]]]
    peak_memory_gb: float
    cpu: float
    start_seconds: float
    is_ours: bool = False
