"""Outputs on their way: how many tokens travel together."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from freehold.ipc.protocol import Ended
from freehold.ipc.streams import Delta, Stream

NEWS = st.lists(st.integers(0, 5), min_size=1, max_size=30)  # tokens that steps bring


def sent(stream: Stream) -> list[Delta]:
    found = []
    while not stream.deltas.empty():
        found.append(stream.deltas.get_nowait())
    return found


@given(NEWS, st.integers(1, 8))
def test_nothing_is_lost_and_only_the_ends_may_be_short(counts, interval):
    stream = Stream(3, None, asyncio.Queue(), None, interval)
    tokens = 0
    for number, count in enumerate(counts):
        new = list(range(tokens, tokens + count))
        tokens += count
        is_last = number == len(counts) - 1
        ended = Ended("a", "length", 1, 0, tokens, 0, 0.0) if is_last else None
        text = "".join(chr(97 + token) for token in new)
        stream.take(Delta(3, text, new, [], ended, number, ends=[token + 1 for token in new]))
        if number == 0:
            assert stream.deltas.qsize() == 1, "the first token waits for nobody"
    deltas = sent(stream)
    assert [token for delta in deltas for token in delta.tokens] == list(range(tokens))
    assert "".join(delta.text for delta in deltas) == "".join(chr(97 + token) for token in range(tokens))
    assert [end for delta in deltas for end in delta.ends] == [token + 1 for token in range(tokens)]
    assert [delta.ended is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].cached_tokens == len(counts) - 1
    assert all(len(delta.tokens) >= interval for delta in deltas[1:-1])
