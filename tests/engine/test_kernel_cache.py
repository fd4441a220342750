"""Compiled kernels are found again only if nothing that they are made of has changed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from numba import njit
from numba.core import caching

from freehold.engine.cpu import kernel_cache, operation
from freehold.engine.cpu.kernel_cache import content_of, parts_of

FOLDER = Path(kernel_cache.__file__).parent


@pytest.fixture
def copy(tmp_path):
    for file in FOLDER.glob("*.py"):
        shutil.copy(file, tmp_path)
    return tmp_path


def contents(folder):
    content_of.cache_clear()
    return {name: content_of(folder / name) for name in ("attention.py", "row_scaled.py")}


def test_a_kernel_is_made_of_what_its_module_imports_directly_or_not():
    names = {part.name for part in parts_of(FOLDER / "attention.py")}
    assert {"attention.py", "attention_block.py", "attention_tiles.py", "vectors.py"} <= names
    assert not {"row_scaled.py", "backend.py"} & names


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("vectors.py", {"attention.py", "row_scaled.py"}),
        ("attention_tiles.py", {"attention.py"}),
        ("backend.py", set()),
    ],
)
def test_what_changes_in_a_part_changes_the_kernels_that_are_made_of_it(copy, part, changed):
    before = contents(copy)
    with (copy / part).open("a") as file:
        file.write("# another line\n")
    after = contents(copy)
    assert {name for name in before if before[name] != after[name]} == changed


def test_kernels_are_kept_by_content():
    cache = operation.address._cache
    assert cache._impl.locator.get_source_stamp() == content_of(FOLDER / "operation.py")


def test_kernels_that_can_not_be_kept_are_told_with_what_to_do(monkeypatch):
    kinds = caching.CacheImpl._locator_classes
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", kinds[-1:])
    with pytest.raises(PermissionError, match="Set NUMBA_CACHE_DIR"):
        njit(cache=True)(contents)


KERNEL = """
from numba import njit
from freehold.lost_kernels import compile_what_is_lost
from {rows} import Row

compile_what_is_lost()

@njit(cache=True)
def first(row):
    return row.first

print(first(Row(7)))
"""


def test_a_kernel_is_compiled_again_when_the_class_of_its_argument_has_moved(tmp_path):
    def run(rows):
        (tmp_path / f"{rows}.py").write_text("from typing import NamedTuple\nclass Row(NamedTuple):\n    first: int\n")
        (tmp_path / "kernel.py").write_text(KERNEL.format(rows=rows))
        return subprocess.run([sys.executable, "-c", "import kernel"], cwd=tmp_path, text=True, capture_output=True)

    assert run("old_rows").stdout == "7\n"
    assert list(tmp_path.glob("__pycache__/*.nbi"))
    (tmp_path / "old_rows.py").unlink()
    after = run("new_rows")
    assert after.stdout == "7\n", after.stderr
