"""Run tests against a copy of the source that has one mistake more."""

from __future__ import annotations

import queue
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from coverage_map import ENVIRONMENT, PYTEST, Tests
from edit import ROOT
from planted import PlantedBug
from random_mutants import RandomMutant

Mutant = PlantedBug | RandomMutant
PLANTED_LIMIT_S = 900
RANDOM_LIMIT_S = 300
TEST_LIMIT_S = (30, 120)  # of one test, which a mistake may make hang: four times what the slowest took, within these
UNMEASURED_S = 30.0


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    caught_by: str | None
    is_cut: bool  # the time was over before all tests had run
    seconds: float


class Trials:
    """Each with a copy of the source of its own: compiled kernels are copied with it."""

    def __init__(self, root: Path, count: int) -> None:
        self._folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(count):
            self._folders.put(root / str(number))

    def run(self, mutant: Mutant, tests: Tests, end: float) -> Verdict | None:
        """None if it is too late."""
        if time.monotonic() > end:
            return None
        folder = self._folders.get()
        try:
            source = folder / "src"
            shutil.rmtree(source, ignore_errors=True)
            shutil.copytree(ROOT / "src", source)
            (source / "freehold" / mutant.edit.file).write_bytes(mutant.edit.changed)
            return _tried(mutant, tests, source)
        finally:
            self._folders.put(folder)


def _tried(mutant: Mutant, tests: Tests, source: Path) -> Verdict:
    slowest = tests.slowest if all("::" in node for node in tests.nodes) else max(tests.slowest, UNMEASURED_S)
    limit = min(max(4 * slowest, TEST_LIMIT_S[0]), TEST_LIMIT_S[1])
    command = [sys.executable, *PYTEST, "--timeout", f"{limit:.0f}", "-x", "--tb=no", *tests.nodes]
    seconds = RANDOM_LIMIT_S if isinstance(mutant, RandomMutant) else PLANTED_LIMIT_S
    before = time.monotonic()
    try:
        run = subprocess.run(
            command, cwd=ROOT, env={**ENVIRONMENT, "PYTHONPATH": str(source)}, capture_output=True, text=True,
            timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Verdict(mutant, None, True, time.monotonic() - before)
    return Verdict(mutant, _catcher(run), False, time.monotonic() - before)


def _catcher(run: subprocess.CompletedProcess[str]) -> str | None:
    if run.returncode in (0, 5):  # 5: no test was chosen
        return None
    if run.returncode < 0:
        return f"the process ended with {signal.Signals(-run.returncode).name}"
    found = re.search(r"^(?:FAILED|ERROR) \S*/(\S+?\.py)(?:::(\S+))?", run.stdout, re.MULTILINE)
    return f"{found[1]}::{found[2] or 'import'}" if found else f"pytest ended with {run.returncode}"
