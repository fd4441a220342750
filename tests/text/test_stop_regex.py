"""Regular expressions that end an output."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freehold.contract.automaton import Automaton, compile_automaton
from freehold.contract.errors import InvalidParameter
from freehold.contract.sampling_params import SamplingParams
from freehold.contract.stop_regex import StopRegexes
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


@pytest.mark.parametrize("pattern", [r"(a|aa)+$b", r"(a*)*b", r"(.*)(.*)(.*)(.*)x", r"(a|a|a|a)*c"])
def test_what_makes_others_backtrack_costs_a_visit_of_each_state(pattern, monkeypatch):
    visits = 0
    closure = Automaton.closure

    def counted(automaton, states, before, after):
        nonlocal visits
        reached = closure(automaton, states, before, after)
        visits += len(reached)
        return reached

    monkeypatch.setattr(Automaton, "closure", counted)
    watch = StopRegexes((pattern,))
    for _ in range(500):
        assert watch.add(b"aaaa") is None
    assert visits <= (2000 + 500) * len(compile_automaton(pattern))


atoms = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", "1", r"\b", "$", "^", "(?i:A)", r"\n"])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}|{p[1]})"),
    ),
    max_leaves=6,
)


@settings(max_examples=600)
@given(patterns, st.text("ab1 \nA", max_size=12))
def test_it_finds_what_brute_force_finds(pattern, text):
    """Character by character: the first place where something that is not empty has matched, from where it began."""
    pattern_ = pattern.replace("$", r"\Z")  # the end of the text so far, not the place before a last newline

    def begins(so_far: str) -> list[int]:
        """Where something that is not empty matches, wherever it ends; what follows counts for word boundaries."""
        ending = [re.compile(rf"(?:{pattern_})(?=(?s:.{{{left}}})\Z)") for left in range(len(so_far))]
        return [
            at
            for at in range(len(so_far))
            for left, one in enumerate(ending)
            if len(so_far) - left > at and (match := one.match(so_far, at)) and match.end() > at
        ]

    expected = next(((min(found), end) for end in range(1, len(text) + 1) if (found := begins(text[:end]))), None)
    found, fed = feed(StopRegexes((pattern,)), text)
    assert (found and (found[0], fed)) == expected


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(a)\1", "groupref"),
        (r"(?=a)b", "assert"),
        (r"(?<!a)b", "assert"),
        (r"(?>a+)b", "atomic"),
        (r"a{600}", "256 states"),
        ("a" * 5000, "at most 4096 characters"),
        ("(" * 3000 + ")" * 3000, "nested too deeply|at most 4096"),
    ],
)
def test_what_no_small_automaton_can_do_is_refused(pattern, why):
    with pytest.raises(InvalidParameter, match=f"stop_regex: .*({why})"):
        SamplingParams(stop_regex=(pattern,))


def test_all_patterns_of_a_request_share_one_limit():
    one = "x" * 28
    assert SamplingParams(stop_regex=(one,) * 8).stop_regex
    with pytest.raises(InvalidParameter, match="together"):
        SamplingParams(stop_regex=(one,) * 9)


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


@pytest.mark.parametrize("name", ["stop", "stop_regex"])
def test_a_stop_that_utf8_cannot_encode_is_refused(name):
    with pytest.raises(InvalidParameter, match=f"{name}: must be text without lone surrogates"):
        SamplingParams(**{name: "\ud800"})
