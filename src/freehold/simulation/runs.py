"""Runs many scenarios: every cell of the matrix with many seeds, on several cores."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from freehold.scheduler.states import TRANSITIONS, Event, RequestState
from freehold.simulation.scenario import Cell, Scenario, matrix
from freehold.simulation.world import Cover, Summary, Violation, World


@dataclass
class Tally:
    """Totals of all runs. `violation` is the first, as (scenario as JSON, message)."""

    scenarios: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    retractions: int = 0
    cover: Cover = field(default_factory=Counter[tuple[RequestState, Event]])
    violation: tuple[str, str] | None = None

    def add(self, summary: Summary, seconds: float) -> None:
        self.scenarios += 1
        self.steps += summary.steps
        self.busy_seconds += seconds
        self.retractions += summary.retractions
        self.cover.update(summary.cover)

    def __str__(self) -> str:
        covered = len(TRANSITIONS) - len(uncovered(self.cover))
        rate = self.steps / max(self.busy_seconds, 1e-9)
        return (
            f"{self.scenarios:,} scenarios, {self.steps:,} steps ({rate:,.0f} a second and core), "
            f"{self.retractions:,} retractions, {covered} of {len(TRANSITIONS)} cells of the state table, "
            f"{'no violation, nothing leaked' if self.violation is None else '1 VIOLATION'}"
        )


Outcome = tuple[Summary | None, float, tuple[str, str] | None]


def run_one(job: tuple[Cell, int]) -> Outcome:
    """Run one scenario, in a worker. Return its summary, or the violation."""
    scenario = Scenario.generate(*job)
    before = time.perf_counter()
    try:
        summary = World(scenario).run()
    except Violation as violation:
        return None, time.perf_counter() - before, (scenario.to_json(), str(violation))
    return summary, time.perf_counter() - before, None


def jobs_for(
    first_seed: int, seeds: int, seconds: float | None, cells: Sequence[Cell] = tuple(matrix())
) -> Iterator[tuple[Cell, int]]:
    """Yield each cell with each seed. With `seconds`, run until the time is up, using fresh seeds once those are
    used."""
    end = None if seconds is None else time.monotonic() + seconds
    for seed in itertools.count(first_seed):
        for cell in cells:
            if seed >= first_seed + seeds if end is None else time.monotonic() >= end:
                return
            yield cell, seed


class _Feed:
    """Hands out jobs only a little ahead of their results, so that the end of the time is noticed soon."""

    def __init__(self, jobs: Iterator[tuple[Cell, int]], ahead: int):
        self._jobs = jobs
        self._ahead = ahead
        self._permits = threading.Semaphore(ahead)
        self._is_stopped = False

    def __iter__(self) -> Iterator[tuple[Cell, int]]:
        for job in self._jobs:
            self._permits.acquire()
            if self._is_stopped:
                return
            yield job

    def done(self) -> None:
        self._permits.release()

    def stop(self) -> None:
        self._is_stopped = True
        for _ in range(self._ahead):
            self._permits.release()


def run_many(jobs: Iterator[tuple[Cell, int]], processes: int) -> Iterator[Tally]:
    """Yield the tally after each scenario; the last one holds a violation, if there was one."""
    tally = Tally()
    if processes == 1:
        for job in jobs:
            yield from _added(tally, run_one(job))
            if tally.violation is not None:
                return
        return
    feed = _Feed(jobs, ahead=8 * processes)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        try:
            for outcome in pool.imap_unordered(run_one, feed):
                feed.done()
                yield from _added(tally, outcome)
                if tally.violation is not None:
                    return
        finally:
            feed.stop()


def _added(tally: Tally, outcome: Outcome) -> Iterator[Tally]:
    summary, seconds, tally.violation = outcome
    if summary is not None:
        tally.add(summary, seconds)
    yield tally


def uncovered(cover: Cover) -> list[str]:
    """Return the cells of the state table that never occurred."""
    return [f"{event} while {state}" for state, event in TRANSITIONS if not cover[state, event]]
