"""Shrinks a failing scenario to a small one that fails alike (delta debugging; Zeller and Hildebrandt 2002)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from freehold.simulation.scenario import Scenario
from freehold.simulation.world import Violation, World

RUNS_MAX = 400


def violation_of(scenario: Scenario) -> Violation | None:
    """Run the scenario once. Return its violation, or None."""
    try:
        World(scenario).run()
    except Violation as violation:
        return violation
    return None


def shrink(
    failed: Violation, run: Callable[[Scenario], Violation | None] = violation_of, runs_max: int = RUNS_MAX
) -> Violation:
    """Leave out happenings, in ever smaller pieces, while the same kind of violation remains. Return the smallest
    found."""
    best, runs = failed, 0
    size = max(len(best.scenario.happenings) // 2, 1)
    while size and runs < runs_max:
        at, has_shrunk = 0, False
        while at < len(best.scenario.happenings) and runs < runs_max:
            kept = best.scenario.happenings[:at] + best.scenario.happenings[at + size :]
            runs += 1
            smaller = run(replace(best.scenario, happenings=kept))
            if smaller is not None and type(smaller.cause) is type(failed.cause):
                best, has_shrunk = smaller, True
            else:
                at += size
        size = size if has_shrunk and size == 1 else size // 2
    return best
