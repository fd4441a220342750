"""`make mutants`: plant each bug in a copy of the source, run the fast suite against it, and write down which
test caught it. Exit code 1 if one survives."""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent.parent
TESTING = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- mutants -->", "<!-- end of mutants -->"
TIMEOUT_S = 240
# Examples first: they are quick, and say what is wrong. Then what is random.
SUITE = [
    "tests/memory/test_pool.py", "tests/memory/test_lease_and_tree.py", "tests/memory/test_retention.py",
    "tests/scheduler/test_scheduler.py",
    "tests/simulation/test_simulation.py", "tests/memory/test_memory_machine.py",
    "tests/scheduler/test_random_workloads.py",
]  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    caught_by: str | None
    seconds: float


def plant(mutant: Mutant, source: Path) -> None:
    path = source / "freehold" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"mutant '{mutant.name}': its text occurs {text.count(mutant.old)} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new))


def try_one(mutant: Mutant, folders: queue.SimpleQueue[Path]) -> Verdict:
    """In one of a few folders: compiled kernels are found by path, and need not be compiled for each mutant."""
    folder = folders.get()
    try:
        source = folder / "src"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(ROOT / "src", source)
        plant(mutant, source)
        cache = {"NUMBA_CACHE_DIR": str(folder / "kernels")}
        environment = {**os.environ, **cache, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *SUITE]
        before = time.monotonic()
        try:
            run = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            found = re.search(r"^(?:FAILED|ERROR) \S*/(\S+?\.py)(?:::(\S+))?", run.stdout, re.MULTILINE)
            caught = f"{found[1]}::{found[2] or 'import'}" if found else None
            if run.returncode not in (0, 1, 2):
                caught = None
        except subprocess.TimeoutExpired:
            caught = "no end in sight (timeout)"
        return Verdict(mutant, caught, time.monotonic() - before)
    finally:
        folders.put(folder)


def table(verdicts: list[Verdict]) -> str:
    rows = ["| planted bug | stands for | caught by | s |", "|---|---|---|---|"]
    for verdict in verdicts:
        caught = f"`{verdict.caught_by}`" if verdict.caught_by else "**survived**"
        rows.append(f"| {verdict.mutant.name} | {verdict.mutant.kind} | {caught} | {verdict.seconds:.0f} |")
    return "\n".join(rows)


def main(names: list[str]) -> int:
    console = Console()
    chosen = [mutant for mutant in MUTANTS if not names or any(name in mutant.name for name in names)]
    verdicts: list[Verdict] = []
    workers = os.cpu_count() or 1
    folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="freehold-mutants-") as root, ThreadPoolExecutor(workers) as pool:
        for number in range(workers):
            folders.put(Path(root) / str(number))
        for verdict in pool.map(lambda mutant: try_one(mutant, folders), chosen):
            verdicts.append(verdict)
            outcome = verdict.caught_by or "SURVIVED"
            console.print(f"{len(verdicts):3}/{len(chosen)} {verdict.mutant.name}: {outcome} ({verdict.seconds:.0f} s)",
                          highlight=False, markup=False, soft_wrap=True)  # fmt: skip
    caught = sum(verdict.caught_by is not None for verdict in verdicts)
    if not names:
        text = TESTING.read_text()
        head, tail = text.split(BEGIN)[0], text.split(END)[1]
        TESTING.write_text(f"{head}{BEGIN}\n{table(verdicts)}\n{END}{tail}")
    console.print(f"{caught} of {len(verdicts)} mutants caught")
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
