"""Which tests run which lines: measured once, before bugs are planted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).parent.parent.parent
# What is quick, and runs the code in this process, in groups that are measured side by side, the longest first. Tests
# of the real model over HTTP are in `DRIVERS`.
MEASURED = [
    ["tests/engine/test_products.py", "tests/engine/test_attention.py"],
    ["tests/simulation"],
    ["tests/scheduler"],
    ["tests/engine/test_speculation.py", "tests/engine/test_invariance.py", "tests/engine/test_sampler.py",
     "tests/engine/test_sequences.py", "tests/engine/test_ngram.py", "tests/engine/test_step_thread.py",
     "tests/engine/test_prompt_logprobs.py", "tests/engine/test_session_turns.py", "tests/engine/test_storage_io.py"],
    ["tests/models/test_sharing.py"],
    ["tests/models/test_adapters.py", "tests/models/test_embeddings.py"],
    ["tests/models/test_families.py", "tests/models/test_gguf.py", "tests/models/test_tensor_shapes.py",
     "tests/engine/test_recurrence.py",
     "tests/models/test_tier_plan.py"],
    ["tests/memory"],
    ["tests/engine/test_grammars.py", "tests/server/test_constraints.py"],
    ["tests/text", "tests/test_llm.py", "tests/server/test_session_table.py", "tests/server/test_engine_loop.py",
     "tests/server/test_session_line.py", "tests/server/test_session_memory.py", "tests/server/test_continuation.py",
     "tests/server/test_errors.py", "tests/server/test_restarts.py",
     "tests/server/test_engine_child.py"],
]  # fmt: skip
# Tests whose code runs in other processes, or is compiled, which no measurement here sees, by what they look at.
DRIVERS = {
    "memory/": ["tests/simulation/test_simulation.py::test_the_diagonal_of_the_matrix",
                "tests/simulation/test_exhaustive.py::test_four_events_deep_in_every_scope"],
    "scheduler/": ["tests/simulation/test_simulation.py::test_the_diagonal_of_the_matrix",
                   "tests/simulation/test_exhaustive.py::test_four_events_deep_in_every_scope"],
    "step.py": ["tests/simulation/test_simulation.py::test_the_diagonal_of_the_matrix"],
    "engine/cpu/attention": ["tests/engine/test_attention.py"],
    "engine/cpu/": ["tests/engine/test_products.py", "tests/engine/test_attention.py",
                    "tests/engine/test_older_processors.py"],
    "engine/": ["tests/server/test_control.py"],
    "ipc/": ["tests/server/test_sessions.py", "tests/server/test_native.py", "tests/server/test_server.py"],
    "server/access/": ["tests/server/test_access.py"],
    "ipc/child.py": ["tests/server/test_faults.py"],
    "server/served_models.py": ["tests/server/test_serving_options.py", "tests/server/test_served_adapters.py"],
    "ipc/async_engine.py": ["tests/server/test_served_adapters.py",
                            "tests/server/test_faults.py::test_a_server_that_was_stopped_goes_on"],
    "server/answers/": ["tests/server/test_tools.py"],
    "server/responses/": ["tests/server/test_responses.py"],
    "server/anthropic/": ["tests/server/test_tools.py", "tests/server/test_anthropic.py"],
    "server/": ["tests/server/test_sessions.py", "tests/server/test_native.py", "tests/server/test_server.py"],
    "conversation.py": ["tests/server/test_sessions.py"],
    "llm.py": [],
}  # fmt: skip
# Plugins that happen to be installed would take most of the time.
ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
PYTEST = ["-m", "pytest", "-q", "-p", "pytest_timeout", "-p", "no:cacheprovider",
          "-m", "not exact and not load and not soak and not hostile"]  # fmt: skip
DATA, REPORT = "coverage", "times.xml"
MEASURED_LIMIT_S = 1500  # of a test: some take minutes on a slow machine


class CoverageMap:
    """For each line of the source the tests that run it: those that import its module first, the quickest before
    others."""

    def __init__(self, jobs: int) -> None:
        self._seconds: dict[str, float] = {}
        self._data = CoverageData(no_disk=True)
        with tempfile.TemporaryDirectory(prefix="freehold-coverage-") as root, ThreadPoolExecutor(jobs) as pool:
            folders = [Path(root) / str(number) for number in range(len(MEASURED))]
            for folder in pool.map(_measure, folders, MEASURED):
                self._seconds |= _seconds(folder / REPORT)
                measured = CoverageData(str(folder / DATA))
                measured.read()
                self._data.update(measured)
        self._files = {path.stem: str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}

    def tests_of(self, file: str, first: int, last: int) -> list[str]:
        """Node ids of tests that run one of the lines first .. last of a file of the package, and of those that import
        it, then those that may run it where no measurement sees it."""
        lines = self._data.contexts_by_lineno(str(ROOT / "src" / "freehold" / file))
        running = self._nodes(lines.get(line, []) for line in range(first, last + 1))
        importers = set(self._importers(file))
        # Lines that no test runs are compiled, or run while a module is imported.
        likely, others = (running, importers) if running else (importers, self._nodes(lines.values()))
        drivers = [test for folder, tests in DRIVERS.items() if file.startswith(folder) for test in tests]

        def quickest_first(nodes: set[str]) -> list[str]:
            return sorted(nodes - set(drivers), key=lambda node: self._seconds.get(node, float("inf")))

        return [*quickest_first(likely), *quickest_first(others - likely), *drivers]

    def _importers(self, file: str) -> list[str]:
        module = "freehold." + file.removesuffix(".py").replace("/", ".")
        package, _, name = module.rpartition(".")
        imported = re.compile(rf"^from ({re.escape(module)} import|{re.escape(package)} import .*\b{name}\b)", re.M)
        paths = [path for path in self._files.values() if imported.search((ROOT / path).read_text())]
        measured = [node for node in self._seconds if node.partition("::")[0] in paths and "::" in node]
        return measured + [path for path in paths if path not in self._seconds]

    def _nodes(self, contexts: Iterable[list[str]]) -> set[str]:
        return {node for of_line in contexts for one in of_line if one and (node := self._node(one)) is not None}

    def _node(self, context: str) -> str | None:
        """test_pool.test_x -> tests/memory/test_pool.py::test_x"""
        module, _, name = context.partition(".")
        path = self._files.get(module)
        if path is None:
            return None
        known = f"{path}::{name}"
        return known if known in self._seconds else path


def _measure(folder: Path, tests: list[str]) -> Path:
    """Run tests, and leave in the folder which lines each ran and how long it took. Raises SystemExit if one fails."""
    folder.mkdir()
    settings = folder / "settings"
    settings.write_text(
        f"[run]\nsource = {ROOT / 'src'}\ndata_file = {folder / DATA}\ndynamic_context = test_function\n"
    )
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", *PYTEST,
               "--timeout", str(MEASURED_LIMIT_S), f"--junitxml={folder / REPORT}", *tests]  # fmt: skip
    ran = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"the tests fail without any planted bug:\n{ran.stdout[-3000:]}")
    return folder


def _seconds(report: Path) -> dict[str, float]:
    """By test function, all its parameters together, and by module."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        path = str(case.get("classname")).replace(".", "/")
        name = str(case.get("name")).partition("[")[0]
        while path and not (ROOT / f"{path}.py").exists():  # a test in a class
            path = path.rpartition("/")[0]
        for node in (f"{path}.py::{name}", f"{path}.py"):
            seconds[node] += float(case.get("time") or 0)
    return dict(seconds)
