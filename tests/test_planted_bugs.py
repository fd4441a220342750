"""The bugs of `make mutants` can be planted in the source as it is now, and random mutants are code."""

import ast
import re
import subprocess
import sys

import pytest
from bugs_of_memory import BUGS as OF_MEMORY
from bugs_of_serving import BUGS as OF_SERVING
from coverage_map import SUITES, suite_of
from edit import ROOT, files
from planted import PlantedBug
from random_mutants import SAMPLED, mutants_of, sample

PLANTED = [*OF_MEMORY, *OF_SERVING]


def test_names_are_unique():
    assert len({bug.name for bug in PLANTED}) == len(PLANTED)


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_a_planted_bug_fits_the_source_once(bug):
    assert suite_of(bug.edit.file)
    assert ast.dump(ast.parse(bug.edit.changed)) != ast.dump(
        ast.parse((ROOT / "src/freehold" / bug.edit.file).read_text())
    )


def test_what_is_left_open_stands_for_the_same_everywhere():
    fits = PlantedBug("", "Epochs.passed", "return _1 <= self.completed", "return _1 < self.completed")
    assert "return fence < self.completed" in fits.edit.changed.decode()
    with pytest.raises(LookupError):
        _ = PlantedBug("", "Epochs.passed", "return _1 <= _1", "pass").edit


def test_tests_of_a_mutant_exist():
    for path in dict.fromkeys(path for suite in SUITES for path in (*suite.measured, *suite.beyond)):
        file, _, name = path.partition("::")
        assert (ROOT / file).exists(), path
        assert not name or re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), path


def test_random_mutants_are_code():
    for mutant in sample(100, 0):
        ast.parse(mutant.edit.changed)


def test_random_mutants_have_names_of_their_own():
    names = [mutant.name for folder in SAMPLED for file in files(folder) for mutant in mutants_of(file)]
    assert len(set(names)) == len(names)


def test_what_has_changed_is_tried_first():
    first, *rest = mutants_of("store/entry.py")
    found = sample(4, 7, ("store",), {first.edit.file: set(first.edit.lines)})
    on_them = [one for one in (first, *rest) if set(one.edit.lines) & set(first.edit.lines)]
    assert found[0] in on_them
    assert len(found) == len(set(found)) == 4
    assert not set(sample(4, 7, ("store",))) - set(sample(400, 7, ("store",)))


def test_a_seed_gives_the_same_sample():
    assert sample(5, 7, ("store",)) == sample(5, 7, ("store",)) != sample(5, 8, ("store",))


def test_a_name_that_no_bug_has_is_refused():
    asked = subprocess.run([sys.executable, ROOT / "tests/mutants", "no such bug"], text=True, capture_output=True)
    assert (asked.returncode, asked.stdout) == (1, "")
    assert "no bug has one of these in its name: no such bug" in asked.stderr
