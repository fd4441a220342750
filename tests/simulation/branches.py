"""Print the branches of memory and scheduler that neither the simulator's matrix nor its exploration reaches.

`python tests/simulation/branches.py`: blocks that end with a broken invariant are left out, and what docs/simulation.md
explains, so the list should be empty: it ends with code 1 if it is not. With a folder, the files of coverage in it are
read and nothing is run.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from coverage import Coverage

from freehold.memory import BrokenInvariant
from freehold.scheduler.states import ImpossibleEvent

ROOT = Path(__file__).parents[2]
SOURCE = ("src/freehold/memory", "src/freehold/scheduler")
RUNS = (("--matrix", "--minutes", "20"), ("--exhaustive", "--minutes", "5"))
TABLE = "<!-- branches -->"
BROKEN = {kind.__name__ for kind in (*BrokenInvariant.__subclasses__(), ImpossibleEvent, AssertionError)}


def explained() -> list[tuple[str, str]]:
    """(file, a part of the line or of "def" with its function's name) of each row of the table."""
    rows = (ROOT / "docs/simulation.md").read_text().split(TABLE)[1].strip().splitlines()[2:]
    cells = [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]
    return [(file, line) for file, line, _ in cells]


def measure(folder: str) -> None:
    """Run the simulator; two processes that share nothing but the file's name."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "coverage", "run", "--branch", "-p", f"--source={','.join(SOURCE)}",
             "-m", "freehold", "simulate", *arguments, "--jobs", "1"],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": "src", "COVERAGE_FILE": f"{folder}/data"},
        )
        for arguments in RUNS
    ]  # fmt: skip
    for process in running:
        if process.wait():
            sys.exit(f"a simulation failed: {process.args}")


def broken(source: str) -> set[int]:
    """The lines of blocks that end with a broken invariant."""
    found: set[int] = set()
    for block in _blocks(ast.parse(source)):
        last = block[-1]
        if isinstance(last, ast.Raise) and isinstance(last.exc, ast.Call):
            if isinstance(last.exc.func, ast.Name) and last.exc.func.id in BROKEN:
                found.update(range(block[0].lineno, (last.end_lineno or last.lineno) + 1))
    return found


def functions_of(source: str) -> dict[int, str]:
    """Line -> "def name" of the function that it is in."""
    found: dict[int, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            found.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), f"def {node.name}"))
    return found


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """What stands under a condition; and the end of each function, alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If):
            yield node.body
        elif isinstance(node, ast.FunctionDef):
            yield node.body[-1:]


def missed(folder: str) -> list[str]:
    """file:line of what was not reached and is not explained."""
    coverage, known, found = Coverage(data_file=f"{folder}/data", branch=True), explained(), []
    coverage.combine([folder], keep=True)
    for file in coverage.get_data().measured_files():
        name, source = Path(file).relative_to(ROOT / "src/freehold").as_posix(), Path(file).read_text()
        analysis, lines = coverage._analyze(file), source.splitlines()
        partial = [first for first, ends in analysis.missing_branch_arcs().items() if analysis.missing.isdisjoint(ends)]
        functions = functions_of(source)
        for number in sorted({*analysis.missing, *partial} - broken(source)):
            text = lines[number - 1].strip()
            if not any(name.startswith(part) and line in (text + functions.get(number, "")) for part, line in known):
                found.append(f"{name}:{number}: {text}")
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="read coverage's files there, and run nothing")
    folder = parser.parse_args().folder
    if folder is not None and not any(folder.glob("data.*")):
        parser.error(f"{folder} has no coverage data (data.*)")
    with tempfile.TemporaryDirectory() as fresh:
        if folder is None:
            measure(fresh)
        found = missed(str(folder or fresh))
    if found:
        print("\n".join(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
