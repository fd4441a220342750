"""Where the engine takes its rows up."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freehold.contract.sampling_params import SamplingParams
from freehold.contract.step import RowStart, Step
from freehold.engine.sequences import Sequences


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
    assert work.chosen.tolist() == [1]
    assert work.tokens.tolist() == [101]
    assert work.starts.tolist() == [3, 3]


def test_drafts_end_one_token_before_the_end_of_the_sequence():
    sequences = started(4, 5, 6, 16)
    assert sequences.room(decode(4, drafts=3)).tolist() == [0, 0, 1, 3]


@given(st.data())
def test_a_step_continues_rows_where_they_are_and_samples_behind_last_tokens(data):
    """Beside plain lists."""
    number = st.integers(0, 6)
    lengths = data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=4))
    limits = [length + data.draw(number) for length in lengths]
    sequences = Sequences(len(lengths), 16)
    known = [[100 * row + i for i in range(length)] for row, length in enumerate(lengths)]
    for row, tokens in enumerate(known):
        sequences.start(RowStart(row, SamplingParams(), 0, np.array(tokens, np.int32), len(tokens), (), limits[row]))
    rows = data.draw(st.permutations(range(len(lengths))))
    decodes = [data.draw(st.booleans()) for _ in rows]
    samples = [decoding or data.draw(st.booleans()) for decoding in decodes]
    starts = [data.draw(st.integers(0, lengths[row] - 1)) for row in rows]
    counts = [
        1 if decoding else data.draw(st.integers(1, lengths[row] - start))
        for row, decoding, start in zip(rows, decodes, starts, strict=True)
    ]
    is_full = [decoding and lengths[row] >= limits[row] for row, decoding in zip(rows, decodes, strict=True)]
    proposed = [data.draw(number) if of and not full else 0 for of, full in zip(decodes, is_full, strict=True)]
    drafts = np.array([[1000 + 10 * i + k for k in range(6)] for i in range(len(rows))], np.int32)

    step = Step(
        number=1, rows=np.array(rows), starts=np.array(starts), counts=np.array(counts), decodes=np.array(decodes),
        samples=np.array(samples), drafts=np.array(proposed),
    )  # fmt: skip
    work = sequences.take_up(step, drafts, np.array(proposed))

    tokens, sampled_at, chosen = [], [], []
    for i, row in enumerate(rows):
        start = lengths[row] - 1 if decodes[i] else starts[i]
        assert work.starts[i] == start
        given_tokens = [] if is_full[i] else known[row][start : start + counts[i]]
        assert work.counts[i] == len(given_tokens)
        tokens += given_tokens
        if samples[i] and given_tokens:
            chosen.append(i)
            sampled_at += range(len(tokens) - 1, len(tokens) + proposed[i])
        tokens += drafts[i, : proposed[i]].tolist()
    assert work.tokens.tolist() == tokens
    assert work.chosen.tolist() == chosen
    assert work.sampled_at.tolist() == sampled_at
