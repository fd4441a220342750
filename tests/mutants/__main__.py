"""`make mutants`: plant each bug in a copy of the source, run the tests that run its lines, and write down which one
caught it. Exit code 1 if a bug survives. With arguments: only those whose names contain one of them."""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from catalogue import MUTANTS
from coverage_map import ENVIRONMENT, PYTEST, ROOT, CoverageMap
from mutant import Mutant
from rich.console import Console

from freehold.engine.cpu.isa import available

PAGE = ROOT / "docs" / "mutants.md"
HEAD = """# Planted bugs

`make mutants` plants each of these in a copy of the source and runs the tests that run its lines. All must be caught.
This page is written by it.
"""
TIMEOUT_S = 600
TEST_LIMIT_S = 60  # of one test: a bug may make it hang
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    caught_by: str | None
    seconds: float


def plant(mutant: Mutant, source: Path) -> None:
    path = source / "freehold" / mutant.file
    path.write_text(path.read_text().replace(mutant.old, mutant.new))


def lines_of(mutant: Mutant) -> tuple[int, int]:
    """The first and the last line that differ. Raises SystemExit if the source has moved on."""
    text = (ROOT / "src" / "freehold" / mutant.file).read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"mutant '{mutant.name}': its text occurs {text.count(mutant.old)} times in {mutant.file}")
    first = text[: text.index(mutant.old)].count("\n") + 1
    old, new = mutant.old.splitlines(), mutant.new.splitlines()
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old) - 1, len(new)))
    return first + same, first + len(old) - 1


def try_one(mutant: Mutant, tests: list[str], folders: queue.SimpleQueue[Path], end: float) -> Verdict | None:
    """In one of a few folders; None if it is too late. Compiled kernels are copied with the source: they need not be
    compiled each time."""
    if time.monotonic() > end:
        return None
    folder = folders.get()
    try:
        source = folder / "src"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(ROOT / "src", source)
        plant(mutant, source)
        environment = {**ENVIRONMENT, "PYTHONPATH": str(source)}
        options = [*PYTEST, "--timeout", str(TEST_LIMIT_S), "-x", "--tb=no"]
        command = [sys.executable, *options, *tests]
        before = time.monotonic()
        try:
            run = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            found = re.search(r"^(?:FAILED|ERROR) \S*/(\S+?\.py)(?:::(\S+))?", run.stdout, re.MULTILINE)
            caught = f"{found[1]}::{found[2] or 'import'}" if found else None
            if -run.returncode in CRASHES:  # compiled code read or wrote where nothing is
                caught = f"the process ended with {signal.Signals(-run.returncode).name}"
            elif run.returncode not in (0, 1, 2):
                caught = None
        except subprocess.TimeoutExpired:
            caught = None  # a test that hangs fails by its own limit: these were only too many
        return Verdict(mutant, caught, time.monotonic() - before)
    finally:
        folders.put(folder)


def table(verdicts: list[Verdict]) -> str:
    rows = ["| planted bug | stands for | caught by |", "|---|---|---|"]
    for verdict in verdicts:
        caught = f"`{verdict.caught_by}`" if verdict.caught_by else "**survived**"
        rows.append(f"| {verdict.mutant.name} | {verdict.mutant.kind} | {caught} |")
    return "\n".join(rows)


def share_of(text: str) -> slice:
    """2/3: the second of three parts of the catalogue, each as mixed as the whole."""
    number, _, count = text.partition("/")
    return slice(int(number) - 1, None, int(count))


def main(names: list[str], share: slice, minutes: float) -> int:
    console, end = Console(), time.monotonic() + 60 * minutes
    there = [mutant for mutant in MUTANTS if mutant.isa in available()]
    chosen = [mutant for mutant in there if not names or any(name in mutant.name for name in names)][share]
    lines = [lines_of(mutant) for mutant in chosen]
    workers = os.cpu_count() or 1
    with console.status("Measuring which tests run which lines ..."):
        covering = CoverageMap(workers)
    tests = [covering.tests_of(mutant.file, *of) for mutant, of in zip(chosen, lines, strict=True)]
    verdicts: list[Verdict] = []
    folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="freehold-mutants-") as root, ThreadPoolExecutor(workers) as pool:
        for number in range(workers):
            folders.put(Path(root) / str(number))
        for verdict in pool.map(lambda one, of: try_one(one, of, folders, end), chosen, tests):
            if verdict is None:
                break
            verdicts.append(verdict)
            outcome = verdict.caught_by or "SURVIVED"
            console.print(f"{len(verdicts):3}/{len(chosen)} {verdict.mutant.name}: {outcome} ({verdict.seconds:.0f} s)",
                          highlight=False, markup=False, soft_wrap=True)  # fmt: skip
    caught = sum(verdict.caught_by is not None for verdict in verdicts)
    if len(verdicts) == len(MUTANTS):
        PAGE.write_text(f"{HEAD}\n{table(verdicts)}\n")
    for verdict in verdicts:
        if verdict.caught_by is None:
            console.print(f"SURVIVED: {verdict.mutant.name}", highlight=False, markup=False, soft_wrap=True)
    late = len(chosen) - len(verdicts)
    console.print(f"{caught} of {len(verdicts)} mutants caught{f', no time for {late} more' if late else ''}")
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only bugs whose names contain one of these")
    parser.add_argument("--share", type=share_of, default=slice(None), help="such as 2/3: the second third of them")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="plant none after that time")
    options = parser.parse_args()
    sys.exit(main(options.names, options.share, options.minutes))
