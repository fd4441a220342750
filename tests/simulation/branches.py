"""Print the branches of memory and scheduler that neither the simulator's matrix nor its exploration reaches.

`python tests/simulation/branches.py`: what docs/testing.md explains is left out, so the list should be empty.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).parents[2]
SOURCE = ("src/freehold/memory", "src/freehold/scheduler")
RUNS = (("--matrix", "--seeds", "1"), ("--exhaustive", "--minutes", "2"))
TABLE = "<!-- branches -->"


def explained() -> list[tuple[str, str]]:
    """(file, a part of the line) of each row of the table; an empty part is the whole file."""
    rows = (ROOT / "docs/testing.md").read_text().split(TABLE)[1].strip().splitlines()[2:]
    cells = [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]
    return [(file, "" if line == "all" else line) for file, line, _ in cells]


def measure(data: str) -> None:
    """Run the simulator; two processes that share nothing but the file's name."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "coverage", "run", "--branch", "-p", f"--source={','.join(SOURCE)}",
             "-m", "freehold", "simulate", *arguments, "--jobs", "1"],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": "src", "COVERAGE_FILE": data},
        )
        for arguments in RUNS
    ]  # fmt: skip
    for process in running:
        if process.wait():
            sys.exit(f"a simulation failed: {process.args}")


def missed(data: str) -> list[str]:
    """file:line of what was not reached and is not explained."""
    coverage, known, found = Coverage(data_file=data, branch=True), explained(), []
    coverage.combine([str(Path(data).parent)])
    for file in coverage.get_data().measured_files():
        name, lines = Path(file).relative_to(ROOT / "src/freehold").as_posix(), Path(file).read_text().splitlines()
        analysis = coverage._analyze(file)
        partial = [first for first, ends in analysis.missing_branch_arcs().items() if analysis.missing.isdisjoint(ends)]
        for number in sorted({*analysis.missing, *partial}):
            text = lines[number - 1].strip()
            if not any(name.startswith(part) and line in text for part, line in known):
                found.append(f"{name}:{number}: {text}")
    return sorted(found)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        measure(f"{folder}/data")
        print("\n".join(missed(f"{folder}/data")))
