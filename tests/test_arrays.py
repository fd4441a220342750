"""Rows of different lengths."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freehold.contract.arrays import ragged


@given(st.lists(st.integers(0, 5), max_size=8))
def test_ragged_rows(counts):
    rows, index = ragged(np.array(counts, np.int64))
    expected = [(row, i) for row, count in enumerate(counts) for i in range(count)]
    assert list(zip(rows.tolist(), index.tolist(), strict=True)) == expected
