"""Which tests run which lines: measured once for each state of the source and of the tests, and kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData
from edit import PACKAGE, ROOT, Edit


@dataclass(frozen=True)
class Suite:
    """The tests of a part of the source. Lines are measured of tests that are quick and run the code in their own
    process. `beyond` follow: they take long, or the code is compiled or runs in another process."""

    part: str
    measured: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ()


LEDGER = ("tests/memory", "tests/scheduler", "tests/simulation")
WORLDS = (
    "tests/scheduler/test_bounds.py",
    "tests/simulation/test_exhaustive.py::test_every_scope_is_explored_some_events_deep",
    "tests/simulation/test_simulation.py::test_a_part_of_the_diagonal_of_the_matrix",
)
SESSIONS = (
    "tests/server/test_session_table.py", "tests/server/test_session_machine.py", "tests/server/test_native.py",
    "tests/server/test_sessions.py",
)  # fmt: skip
KERNELS = ("tests/engine/test_products.py", "tests/engine/test_attention.py")
# The first that a file is part of.
SUITES = [
    Suite("memory", LEDGER, WORLDS),
    Suite("scheduler", (*LEDGER, "tests/server/test_engine_loop.py"), WORLDS),
    Suite("store", ("tests/store",), ("tests/engine/test_storage_io.py", "tests/server/test_storage_backend.py",
                                      "tests/server/test_tier_restarts.py")),
    Suite("server/access", ("tests/server/test_session_table.py",),
          ("tests/server/test_access.py", "tests/server/test_cache_and_keys.py")),
    Suite("text", ("tests/text", "tests/server/test_continuation.py"),
          ("tests/test_chat.py", "tests/server/test_tools.py", "tests/server/test_agents.py")),
    Suite("contract/prefix_keys", ("tests/store",),
          ("tests/memory/test_host_tier.py", "tests/models/test_tier_plan.py")),
    Suite("runtime/tier_plan", (), ("tests/models/test_tier_plan.py",)),
    Suite("engine/cpu/recurrence", (), ("tests/engine/test_recurrence.py", "tests/models/test_sharing.py")),
    Suite("engine/cpu/state_batch", (), ("tests/engine/test_recurrence.py", "tests/models/test_sharing.py")),
    Suite("engine/cpu/attention", (), ("tests/engine/test_attention.py",)),
    Suite("engine/cpu/softmax", (), ("tests/engine/test_softmax.py", "tests/engine/test_attention.py")),
    Suite("engine/cpu/re", (), ("tests/engine/test_invariance.py",)),
    Suite("engine/cpu/kernel_cache", (), ("tests/engine/test_kernel_cache.py",)),
    Suite("engine/cpu/caches", (), ("tests/engine/test_attention.py", "tests/models/test_sharing.py")),
    Suite("engine/cpu", (), KERNELS),
    Suite("engine/grammar", (), ("tests/engine/test_grammars.py", "tests/server/test_structured_output.py")),
    Suite("engine/adapters", (), ("tests/models/test_adapters.py",)),
    Suite("engine", (), ("tests/engine/test_speculation.py", "tests/engine/test_sequences.py", *SESSIONS)),
    Suite("ipc", (), ("tests/server/test_engine_setup.py", "tests/server/test_server.py", *SESSIONS)),
    Suite("server", (), SESSIONS),
]  # fmt: skip
PYTEST = ["-m", "pytest", "-q", "-p", "pytest_timeout", "-p", "no:cacheprovider",
          "-m", "not exact and not load and not soak and not hostile"]  # fmt: skip
# Plugins that happen to be installed would take most of the time, and so would making a failure small.
ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HYPOTHESIS_PROFILE": "unshrunk"}
KEPT = ROOT / "build" / "coverage"
DATA, REPORT = "lines", "times.xml"
HERE, CONTEXTS = Path(__file__).parent, "contexts"


@dataclass(frozen=True)
class Tests:
    """Node ids in the order in which they run, and the seconds that the slowest of those measured takes."""

    nodes: list[str]
    slowest: float


class CoverageMap:
    """For each line of the source the tests that run it, the quickest first."""

    def __init__(self, edits: Iterable[Edit], jobs: int) -> None:
        self._seconds: dict[str, float] = {}
        self._data = CoverageData(no_disk=True)
        suites = dict.fromkeys(suite_of(edit.file) for edit in edits)
        files = dict.fromkeys(file for suite in suites for file in _files_of(suite))
        source = _hash_of(PACKAGE)
        with ThreadPoolExecutor(jobs) as pool:
            for folder in pool.map(lambda file: _measured(file, source), files):
                self._seconds |= _seconds(folder / REPORT)
                measured = CoverageData(str(folder / DATA))
                measured.read()
                self._data.update(measured)

    def tests_of(self, edit: Edit) -> Tests:
        suite = suite_of(edit.file)
        lines = self._data.contexts_by_lineno(str(PACKAGE / edit.file))
        # Lines that no test runs do so while a module is imported: then all tests of the file.
        running = self._nodes(lines.get(line, []) for line in edit.lines) or self._nodes(lines.values())
        quickest = sorted(running - set(suite.beyond), key=lambda node: self._seconds.get(node, 0.0))
        slowest = max((self._seconds.get(node, 0.0) for node in quickest), default=0.0)
        return Tests([*quickest, *suite.beyond], slowest)

    def _nodes(self, contexts: Iterable[list[str]]) -> set[str]:
        return {node for of_line in contexts for node in of_line if node}


def suite_of(file: str) -> Suite:
    return next(suite for suite in SUITES if file.startswith(suite.part))


def _hash_of(folder: Path) -> bytes:
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).digest()


def _files_of(suite: Suite) -> list[str]:
    found: list[Path] = []
    for path in suite.measured:
        found += sorted((ROOT / path).rglob("test_*.py")) if (ROOT / path).is_dir() else [ROOT / path]
    return [file for one in found if (file := str(one.relative_to(ROOT))) not in suite.beyond]


def _measured(path: str, source: bytes) -> Path:
    """A folder with the lines that each test of a file runs, and its time. Raises SystemExit if one fails."""
    beside = {file for folder in (ROOT / "tests", (ROOT / path).parent) for file in folder.glob("*.py")}
    shared = sorted(file for file in beside if not file.name.startswith("test_"))
    hashes = map(_hash_of, [ROOT / path, *shared, HERE / f"{CONTEXTS}.py"])
    content = hashlib.sha256(source + b"".join(hashes)).hexdigest()[:16]
    name = path.replace("/", "-").removesuffix(".py")
    folder = KEPT / f"{name}@{content}"
    if (folder / REPORT).exists():
        return folder
    for old in KEPT.glob(f"{name}@*"):
        shutil.rmtree(old)
    folder.mkdir(parents=True)
    settings = folder / "settings"
    parts = ",".join(
        f"{PACKAGE / suite.part}{'' if '.' in suite.part else '/**'}" for suite in SUITES if suite.measured
    )
    settings.write_text(f"[run]\ninclude = {parts}\ndata_file = {folder / DATA}\n")
    left_out = [f"--deselect={test}" for suite in SUITES for test in suite.beyond if test.startswith(f"{path}::")]
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", *PYTEST, "-p", CONTEXTS,
               f"--junitxml={folder / 'running.xml'}", *left_out, path]  # fmt: skip
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"the tests fail without any planted bug:\n{ran.stdout[-3000:]}")
    (folder / "running.xml").rename(folder / REPORT)
    return folder


def _seconds(report: Path) -> dict[str, float]:
    """By test function, all its parameters together."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        path, names = str(case.get("classname")).replace(".", "/"), [str(case.get("name")).partition("[")[0]]
        while path and not (ROOT / f"{path}.py").exists():  # a test in a class
            path, _, outer = path.rpartition("/")
            names.insert(0, outer)
        seconds["::".join([f"{path}.py", *names])] += float(case.get("time") or 0)
    return dict(seconds)
