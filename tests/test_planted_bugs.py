"""The bugs of `make mutants` can be planted in the source as it is now."""

from pathlib import Path

import pytest
from catalogue import MUTANTS

SOURCE = Path(__file__).parent.parent / "src" / "freehold"


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_that_a_mutant_replaces_is_there_once(mutant):
    assert (SOURCE / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new
