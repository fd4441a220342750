"""`make mutants`: make one mistake at a time in a copy of the source, and see whether a test fails that runs its line.

Some mistakes are planted: none may survive. Others are a random sample: those that survive are listed in
`build/survivors.md`, with the command that repeats each.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, zip_longest
from pathlib import Path

import bugs_of_memory
import bugs_of_serving
from coverage_map import CoverageMap
from edit import ROOT
from planted import PlantedBug
from random_mutants import SAMPLED, mutants_of, sample
from rich.console import Console
from trial import Mutant, Trials, Verdict

from freehold.engine.cpu.isa import available

PLANTED = [*bugs_of_memory.BUGS, *bugs_of_serving.BUGS]
SURVIVORS = ROOT / "build" / "survivors.md"


def chosen(options: argparse.Namespace) -> list[Mutant]:
    """Planted and random ones in turns, so that both have a part of the time."""
    if options.names:
        files = dict.fromkeys(name.partition(":")[0] for name in options.names if ":" in name)
        every: list[Mutant] = [*PLANTED, *(mutant for file in files for mutant in mutants_of(file))]
        found = [mutant for mutant in every if any(name in mutant.name for name in options.names)]
        if not found:
            raise SystemExit(f"no bug has one of these in its name: {', '.join(options.names)}")
        return found
    number, _, count = options.share.partition("/")
    planted = [bug for bug in PLANTED if bug.isa in available()][int(number) - 1 :: int(count)] if int(number) else []
    pairs = zip_longest(planted, sample(options.sample, options.seed, tuple(options.folders), changed_lines()))
    return [mutant for mutant in chain.from_iterable(pairs) if mutant is not None]


def survivors(verdicts: list[Verdict], seed: int) -> str:
    parts = [f"# Mutants that no test caught (seed {seed})\n"]
    for verdict in verdicts:
        if verdict.caught_by is None:
            name = verdict.mutant.name
            cut = " The time was over before all tests had run.\n" if verdict.is_cut else ""
            parts.append(f'## {name}\n\n`.venv/bin/python tests/mutants "{name}"`{cut}\n')
            parts.append(f"```diff\n{verdict.mutant.edit.diff}\n```\n")
    return "\n".join(parts)


def shares(verdicts: list[Verdict]) -> str:
    """Planted ones, and random ones by folder."""
    counts: defaultdict[str, list[bool]] = defaultdict(list)
    for verdict in verdicts:
        file = verdict.mutant.edit.file
        folder = next((part for part in SAMPLED if file.startswith(f"{part}/")), file)
        part = "planted" if isinstance(verdict.mutant, PlantedBug) else folder
        counts[part].append(verdict.caught_by is not None)
    return ", ".join(f"{part} {sum(of)} of {len(of)} caught ({sum(of) / len(of):.0%})" for part, of in counts.items())


def main(options: argparse.Namespace) -> int:
    console, end = Console(highlight=False, markup=False, soft_wrap=True), time.monotonic() + 60 * options.minutes
    mutants, workers = chosen(options), options.workers
    console.print(
        f"{len(mutants)} mutants, seed {options.seed}: measuring which tests run which lines, if they changed"
    )
    covering = CoverageMap([mutant.edit for mutant in mutants], workers)
    tests = [covering.tests_of(mutant.edit) for mutant in mutants]
    verdicts: list[Verdict] = []
    SURVIVORS.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="freehold-mutants-") as root, ThreadPoolExecutor(workers) as pool:
        trials = Trials(Path(root), workers)
        for verdict in pool.map(lambda mutant, of: trials.run(mutant, of, end), mutants, tests):
            if verdict is None:
                break
            verdicts.append(verdict)
            SURVIVORS.write_text(survivors(verdicts, options.seed))
            outcome = verdict.caught_by or ("SURVIVED, cut" if verdict.is_cut else "SURVIVED")
            console.print(
                f"{len(verdicts):3}/{len(mutants)} {verdict.mutant.name}: {outcome} ({verdict.seconds:.0f} s)"
            )
    late = len(mutants) - len(verdicts)
    console.print(f"{shares(verdicts)}{f'; no time for {late} more' if late else ''}")
    if any(verdict.caught_by is None for verdict in verdicts):
        console.print(f"Survivors: {SURVIVORS.relative_to(ROOT)}")
    survived = (one.mutant for one in verdicts if one.caught_by is None and not one.is_cut)
    return int(any(isinstance(mutant, PlantedBug) for mutant in survived))


def git(*arguments: str) -> str:
    """Its output; empty outside a repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def commit() -> int:
    return int(git("rev-parse", "--short=8", "HEAD").strip() or "0", 16)


def changed_lines() -> dict[str, set[int]]:
    """Lines that the last commit changed, by file below src/freehold."""
    lines: defaultdict[str, set[int]] = defaultdict(set)
    file = ""
    for line in git("diff", "--unified=0", "HEAD~1", "HEAD", "--", "src/freehold").splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/src/freehold/")
        elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(found[1]), int(found[2] or 1)
            lines[file].update(range(first, first + count))
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only these: a part of what a bug is called, or a survivor's name")
    parser.add_argument("--share", default="1/1", help="of the planted ones, such as 2/3: the second third; 0/1: none")
    parser.add_argument("--sample", type=int, default=200, help="so many random ones")
    parser.add_argument("--seed", type=int, default=commit(), help="of the sample; the commit's, if not given")
    parser.add_argument("--folders", nargs="+", default=SAMPLED, help="that the sample is from")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after that time")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    sys.exit(main(parser.parse_args()))
