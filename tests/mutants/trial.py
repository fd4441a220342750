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

import psutil
from coverage_map import ENVIRONMENT, PYTEST, Tests
from edit import ROOT
from planted import PlantedBug
from random_mutants import RandomMutant

Mutant = PlantedBug | RandomMutant
PLANTED_LIMIT_S = 600
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
    command = [sys.executable, *PYTEST, "--timeout", f"{limit:.0f}", "-x", "--tb=no", "--core", *tests.nodes]
    seconds = RANDOM_LIMIT_S if isinstance(mutant, RandomMutant) else PLANTED_LIMIT_S
    environment, before = {**ENVIRONMENT, "PYTHONPATH": str(source)}, time.monotonic()
    with psutil.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        try:
            output = run.communicate(timeout=seconds)[0].decode()
            caught, is_cut = _catcher(run.returncode, output), False
        except subprocess.TimeoutExpired:
            for process in (*run.children(recursive=True), run):
                process.kill()
            caught, is_cut = None, True
    return Verdict(mutant, caught, is_cut, time.monotonic() - before)


def _catcher(status: int, output: str) -> str | None:
    if status in (0, 5):  # 5: no test was chosen
        return None
    if status < 0:
        return f"the process ended with {signal.Signals(-status).name}"
    found = re.search(r"^(?:FAILED|ERROR) \S*/(\S+?\.py)(?:::(\S+))?", output, re.MULTILINE)
    return f"{found[1]}::{found[2] or 'import'}" if found else f"pytest ended with {status}"
