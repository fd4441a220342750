"""`freehold simulate`: runs, shows and replays simulations."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from freehold.simulation.exhaustive import Counterexample, Exploration, explore
from freehold.simulation.runs import Tally, jobs_for, run_many, uncovered
from freehold.simulation.scenario import Scenario, matrix
from freehold.simulation.shrink import shrink, violation_of
from freehold.simulation.small_world import Scope
from freehold.simulation.world import Violation, World

EXHAUSTIVE_MINUTES = 10.0
LINE_S = 10.0
console = Console()
BAR = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


class Lines:
    """Progress for output without a bar, such as a file: a line every LINE_S seconds."""

    def __init__(self) -> None:
        self._due = time.monotonic() + LINE_S

    def __call__(self, text: str) -> None:
        if not console.is_terminal and time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_S
            console.print(text, highlight=False, markup=False)


@dataclass(frozen=True)
class MatrixRun:
    seeds: int
    first_seed: int
    processes: int
    minutes: float | None


def simulate_matrix(run: MatrixRun) -> int:
    """Run the matrix. Return the exit code: 1 after a violation, which is shown and shrunk."""
    total = run.seeds * len(list(matrix()))
    tally = Tally()
    say = Lines()
    jobs = jobs_for(run.first_seed, run.seeds, None if run.minutes is None else run.minutes * 60)
    with Progress(*BAR, console=console, transient=True) as progress:
        task = progress.add_task("scenarios", total=total)
        for tally in run_many(jobs, run.processes):
            progress.update(task, completed=tally.scenarios, total=max(total, tally.scenarios))
            say(f"{tally.scenarios:,} scenarios, {tally.steps:,} steps")
    if tally.violation is not None:
        text, message = tally.violation
        console.print(message, highlight=False, markup=False)
        scenario = Scenario.from_json(text)
        console.print(f"replay it: freehold simulate --cell {scenario.cell} --seed {scenario.seed}", soft_wrap=True)
        _show_shrunk(violation_of(scenario))
    missing = uncovered(tally.cover)
    if missing and tally.violation is None:
        console.print(f"never happened: {', '.join(missing)}")
    console.print(str(tally), highlight=False, soft_wrap=True)
    return 0 if tally.violation is None else 1


def simulate_exhaustive(minutes: float, processes: int) -> int:
    """Try every order of events, as deep as time allows. Return the exit code: 1 after a violation, which is shown."""
    explorations: dict[Scope, Exploration] = {}
    counterexample: Counterexample | None = None
    say = Lines()
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("exploring")
        try:
            for one in explore(seconds=minutes * 60, processes=processes):
                explorations[one.scope] = one
                states = sum(other.states for other in explorations.values())
                text = f"{states:,} states; {one.scope}, depth {one.depth}"
                progress.update(task, description=text)
                say(text)
        except Counterexample as found:
            counterexample = found
    table = Table("scope", "states", "transitions", "events deep", "", title="Every order of events")
    for one in explorations.values():
        table.add_row(
            str(one.scope), f"{one.states:,}", f"{one.transitions:,}", str(one.depth), "all" if one.is_complete else ""
        )
    console.print(table)
    if counterexample is not None:
        console.print(f"VIOLATION: {counterexample}", highlight=False, markup=False)
        return 1
    states, transitions = (
        sum(getattr(one, name) for one in explorations.values()) for name in ("states", "transitions")
    )
    console.print(f"{states:,} states, {transitions:,} transitions, no violation", highlight=False)
    return 0


def simulate_one(scenario: Scenario) -> int:
    """Run one scenario and print its log hash. Return the exit code."""
    try:
        summary = World(scenario).run()
    except Violation as violation:
        console.print(str(violation), highlight=False, markup=False)
        _show_shrunk(violation)
        return 1
    console.print(
        f"cell {scenario.cell}, seed {scenario.seed}: {summary.steps} steps, {summary.retractions} retractions, "
        f"log {summary.log_hash}, no violation",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _show_shrunk(violation: Violation | None) -> None:
    if violation is None:
        console.print("it did not happen again: something outside the seed matters")
        return
    with console.status("shrinking the scenario ..."):
        smallest = shrink(violation)
    with tempfile.NamedTemporaryFile("w", prefix="freehold-", suffix=".json", delete=False) as file:
        file.write(smallest.scenario.to_json())
    count = len(smallest.scenario.happenings)
    console.print(f"shrunk to {count} happenings: freehold simulate --scenario {file.name}", soft_wrap=True)
    for happening in smallest.scenario.happenings[:20]:
        console.print(f"  {happening.at:4} {happening.verb} {happening.arguments}"[:160], highlight=False, markup=False)
