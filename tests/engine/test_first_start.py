"""A second process compiles what the first one needs later, on a start that finds no kernels."""

import os
import subprocess
import sys

import pytest

from freehold.engine.cpu import first_start
from freehold.engine.cpu.isa import choose
from freehold.engine.cpu.kernel_cache import is_kept
from freehold.engine.cpu.step_items import divide

FIND = "from freehold.engine.cpu.{0} import {1}; print(len({1}._cache._cache_file._load_index()))"


def test_nothing_is_compiled_beside_where_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_start, "is_kept", lambda kernel: True)
    assert first_start.compile_beside("bfloat16", choose()) is None


@pytest.mark.thorough
def test_what_is_compiled_beside_is_kept_for_the_engine(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(first_start, "is_kept", lambda kernel: False)
    process = first_start.compile_beside("bfloat16", choose())
    assert process is not None
    assert process.wait() == 0
    for module, name in [("step_items", "divide"), ("team", "run_by_team"), ("drawing", "draw")]:
        command = [sys.executable, "-c", FIND.format(module, name)]
        assert subprocess.run(command, env=os.environ, capture_output=True, text=True).stdout == "1\n", name


def test_a_kernel_that_ran_is_kept() -> None:
    first_start._compile("bfloat16", choose())
    assert is_kept(divide)
