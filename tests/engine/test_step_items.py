"""What the threads take of a step: every token once, and together only what is the same for all."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from freehold.engine.cpu.attention import BATCH
from freehold.engine.cpu.items import SEGMENT, WHOLE
from freehold.engine.cpu.softmax import KEYS
from freehold.engine.cpu.step_items import divide

LENGTH = 3 * SEGMENT


@st.composite
def steps(draw):
    """Sequences whose tables begin alike or not, and go on with whatever their last users left there."""
    page_size, count = draw(st.sampled_from([1, 16, 64])), draw(st.integers(1, 9))
    columns = LENGTH // page_size
    pages = np.arange(1, 1 + count * columns, dtype=np.int32).reshape(count, columns)
    for one in range(1, count):
        same = draw(st.sampled_from([0, 0, 64, 70, 128, 500, LENGTH])) // page_size
        pages[one, :same] = pages[draw(st.integers(0, one - 1)), :same]
    starts = draw(st.lists(st.sampled_from([0, 1, 63, 64, 65, 200, 513, 1400]), min_size=count, max_size=count))
    counts = draw(st.lists(st.sampled_from([1, 1, 1, 2, 33, 100]), min_size=count, max_size=count))
    rows = draw(st.permutations(range(count)))
    return pages, page_size, np.array(rows), np.array(starts), np.array(counts), draw(st.booleans())


@settings(max_examples=300)
@given(steps())
def test_every_token_is_attended_once_and_reads_its_own_pages(step):
    tables, page_size, rows, starts, counts, may_share = step
    positions, slots, firsts, shared, members, parts, joined, _ = divide(*step[:5], may_share, 2, np.zeros(1, BATCH))
    sequences = np.repeat(np.arange(len(rows)), counts)
    expected = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)])
    np.testing.assert_array_equal(positions, expected)
    own = tables[rows[sequences], expected // page_size] * page_size + expected % page_size
    np.testing.assert_array_equal(slots, own)

    taken = np.zeros(len(positions), np.int64)
    for row, token, n, start in members.T:
        taken[token : token + n] += 1
        assert rows[sequences[token]] == row
        np.testing.assert_array_equal(positions[token : token + n], np.arange(start, start + n))
    assert (taken == 1).all()

    assert (firsts[0], firsts[-1]) == (0, members.shape[1])
    assert (np.diff(firsts) > 0).all()
    for item, common in enumerate(shared):
        of = members[:, firsts[item] : firsts[item + 1]]
        assert common % KEYS == 0
        assert of.shape[1] == 1 or (of[2] == 1).all()
        assert common <= of[3].min()  # what lies further was never written by all of them
        seen = tables[of[0], : common // page_size]
        assert (seen == seen[0]).all()

    _check_parts(firsts, members, parts, joined)


def _check_parts(firsts, members, parts, joined):
    """All of an item, or each of its segments once, which are then joined."""
    for item in range(len(firsts) - 1):
        segments = parts[1, parts[0] == item]
        of = members[:, firsts[item] : firsts[item + 1]]
        if item in joined[0]:
            (join,) = np.flatnonzero(joined[0] == item)
            needed = -(-int((of[3] + of[2]).max()) // SEGMENT)
            assert sorted(segments) == list(range(needed))
            assert joined[1, join] == needed
        else:
            assert segments.tolist() == [WHOLE]
