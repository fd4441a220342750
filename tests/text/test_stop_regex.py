"""Regular expressions that end an output."""

import pytest

from freehold.sampling_params import InvalidParameter, SamplingParams
from freehold.stop_regex import StopRegexes, StopRegexTooSlow
from freehold.text.detokenizer import Detokenizer


def feed(watch: StopRegexes, text: str, size: int = 1):
    """-> what was found, and how much had been fed."""
    for at in range(0, len(text), size):
        found = watch.add(text[at : at + size].encode())
        if found is not None:
            return found, at + size
    return None, len(text)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    ("patterns", "text", "at", "pattern"),
    [
        ((r"\d{4}",), "in the year 1984 it", 12, r"\d{4}"),
        ((r"\n\n",), "one\ntwo\n\nthree", 7, r"\n\n"),
        ((r"end", r"[ab]+c"), "xx aabac end", 3, r"[ab]+c"),
        ((r"é.",), "café!", 3, r"é."),
    ],
)
def test_the_first_match_ends_it(patterns, text, at, pattern, size):
    found, fed = feed(StopRegexes(patterns), text, size)
    assert found == (at, pattern)
    assert fed <= at + len(pattern) + 6 + size


def test_what_may_become_a_match_is_held():
    watch = StopRegexes((r"ab+c",))
    for piece, held in (("x", 0), ("a", 1), ("bb", 3), ("x", 0), ("ab", 2)):
        assert watch.add(piece.encode()) is None
        assert watch.held == held
    assert watch.add(b"c") == (5, "ab+c")


def test_a_match_before_the_output_may_stop_is_passed_over():
    watch = StopRegexes((r"no",))
    assert watch.add(b"no", may_stop=False) is None
    assert watch.held == 0
    assert watch.add(b" and no") == (7, "no")


def test_an_expression_that_takes_forever_is_given_up():
    watch = StopRegexes((r"(a|aa)+$b",))
    with pytest.raises(StopRegexTooSlow):
        watch.add(b"a" * 200)


@pytest.mark.parametrize("pattern", ["(", "[a", "(?P<x>a)(?P<x>b", ""])
def test_what_is_no_expression_is_refused(pattern):
    with pytest.raises(InvalidParameter, match="stop_regex"):
        SamplingParams(stop_regex=(pattern,))


def test_text_stops_before_the_match_and_nothing_of_it_is_shown(tokenizer):
    text = "It was in 1984 that"
    detokenizer, shown = Detokenizer(tokenizer, SamplingParams(stop_regex=(r"\s\d{4}",))), ""
    for token in tokenizer.encode(text).tolist():
        shown += detokenizer.add(token)
        assert "It was in".startswith(shown)
        if "1984" in detokenizer.text:
            break
    assert shown + detokenizer.finish(r"\s\d{4}") == "It was in" == detokenizer.text
