"""Where the engine takes its rows up."""

import numpy as np

from freehold.engine.sequences import Sequences
from freehold.sampling_params import SamplingParams
from freehold.step import RowStart, Step


def started(*max_lengths: int) -> Sequences:
    """Rows of three prompt tokens, of which each has sampled one more."""
    sequences = Sequences(len(max_lengths), 16)
    for row, max_length in enumerate(max_lengths):
        prompt = np.array([10 * row + i for i in range(3)], np.int32)
        sequences.start(RowStart(row, SamplingParams(), 0, prompt, 3, (), max_length))
    rows = np.arange(len(max_lengths))
    sequences.append(rows, np.ones_like(rows), (100 + rows).astype(np.int32))
    return sequences


def decode(rows: int, drafts: int = 0) -> Step:
    ones = np.ones(rows, np.int64)
    return Step(
        number=1, rows=np.arange(rows), starts=3 * ones, counts=ones, decodes=np.ones(rows, np.bool_),
        samples=np.ones(rows, np.bool_), drafts=drafts * ones,
    )  # fmt: skip


def test_a_row_that_turned_out_to_be_full_computes_and_samples_nothing():
    sequences = started(4, 5)
    work = sequences.take_up(decode(2), np.zeros((2, 0), np.int32), np.zeros(2, np.int64))
    assert work.counts.tolist() == [0, 1]
    assert work.samples.tolist() == [False, True]
    assert work.tokens.tolist() == [101]
    assert work.starts.tolist() == [3, 3]


def test_drafts_end_one_token_before_the_end_of_the_sequence():
    sequences = started(4, 5, 6, 16)
    assert sequences.room(decode(4, drafts=3)).tolist() == [0, 0, 1, 3]
