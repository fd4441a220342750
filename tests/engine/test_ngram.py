"""Prompt lookup."""

import numpy as np
import pytest

from freehold.engine.speculative.ngram import find_continuation


@pytest.mark.parametrize(
    ("tokens", "where"),
    [
        ([1, 2, 3, 4, 1, 2], 2),
        ([1, 2, 3, 1, 2, 4, 1, 2], 5),  # the newest of equally long matches
        ([9, 1, 2, 3, 1, 2, 4, 9, 1, 2], 3),  # a longer match wins
        ([1, 2, 3, 4], -1),
        ([5, 5, 5, 5], 3),
        ([1], -1),
    ],
)
def test_prompt_lookup(tokens, where):
    assert find_continuation(np.array(tokens, np.int32), len(tokens), 2, 6) == where
