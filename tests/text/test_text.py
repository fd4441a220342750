import codecs
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freehold.contract.errors import ChatTemplateError
from freehold.contract.sampling_params import SamplingParams
from freehold.contract.vocabulary import find_stop
from freehold.text.chat_template import ChatTemplate
from freehold.text.detokenizer import Detokenizer

TEXTS = ["Hello, world", "12345 + 1 = 12346", "naïve café, 你好, 🎉 done", "  indented\n\n\tand tabbed\r\n", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_digits_are_single_tokens_and_special_tokens_are_whole(tokenizer):
    assert len(tokenizer.encode("1234")) == 4
    tokens = tokenizer.encode("<|im_start|>user").tolist()
    assert tokens[0] == 1
    assert tokenizer.decode(tokens) == "user"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "<|im_start|>user"


def test_the_models_chat_template(tokenizer):
    text = tokenizer.chat_template.render([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_templates_are_sandboxed_and_their_refusals_are_heard():
    with pytest.raises(ChatTemplateError, match="only users"):
        ChatTemplate("{{ raise_exception('only users') }}", {}).render([])
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render([])


@given(st.text(max_size=40))
def test_text_arrives_piece_by_piece_wherever_it_is_cut(tokenizer, text):
    tokens = tokenizer.encode(text).tolist()
    for count in range(len(tokens) + 1):
        detokenizer, whole = Detokenizer(tokenizer), b"".join(tokenizer.pieces[token] for token in tokens[:count])
        shown = "".join(detokenizer.add(token) for token in tokens[:count]) + detokenizer.finish(None)
        assert shown == detokenizer.text == whole.decode(errors="replace")


def test_marks_stand_for_their_tokens(tokenizer):
    (half, *_), (start,) = tokenizer.encode("é").tolist(), tokenizer.encode("<|im_start|>").tolist()
    broken = [token for token in range(300) if tokenizer.pieces[token] == b"\xc3"] or [half]
    detokenizer = Detokenizer(tokenizer, marks={start: "\ud800"})
    shown = "".join(detokenizer.add(token) for token in [*tokenizer.encode("a").tolist(), broken[0], start])
    assert shown == "a\ufffd\ud800", "half a character is not lost"
    assert detokenizer.ends == [1, 1, 3]


def test_text_that_may_become_a_stop_is_held_back(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("END.",)))
    shown = [
        detokenizer.add(token) for piece in ("one E", "ND of", " E", "N", "D", ".") for token in tokenizer.encode(piece)
    ]
    assert "".join(shown) == "one END of "
    assert detokenizer.finish("END.") == ""
    assert detokenizer.text == "one END of "


def test_held_back_text_is_shown_if_no_stop_came(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=("END.",)))
    shown = "".join(detokenizer.add(token) for token in tokenizer.encode("the END"))
    assert shown == "the "
    assert detokenizer.finish(None) == "END"


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_token_that_ended_the_text_is_shown_if_asked_for_be_it_special_or_not(tokenizer, include, skips):
    for end in (tokenizer.encode(" b")[0], tokenizer.eos_tokens[0]):
        params = SamplingParams(include_stop=include)
        detokenizer, tokens = (
            Detokenizer(tokenizer, params, skip_special_tokens=skips),
            [*tokenizer.encode("a a").tolist(), int(end)],
        )
        shown = detokenizer.finish(int(end), tokens)
        assert shown == detokenizer.text == "a a" + (tokenizer.pieces[end].decode() if include else "")


@given(st.lists(st.sampled_from([b"a", b"b", b"ab", b"ba", b"c"]), max_size=30))
def test_a_stop_is_found_as_soon_as_it_is_complete(pieces):
    stops = (b"abba", b"cab")
    tail, text = b"", b""
    for piece in pieces:
        text += piece
        found, tail = find_stop(tail, piece, stops)
        assert (found is not None) == any(stop in text for stop in stops)
        if found is not None:
            assert stops[found] in text
            return


PIECES = [b"a", b"b", b"aa", b"bab", "é".encode()[:1], "é".encode()[1:]]


@settings(max_examples=500)
@given(
    st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=9),
    st.lists(st.sampled_from(["aa", "aba", "aaa", "bb", "éa"]), min_size=1, max_size=2, unique=True),
    st.integers(0, 5),
    st.booleans(),
)
def test_a_text_ends_where_a_stop_begins_that_did_not_come_too_early(tokens, stops, min_tokens, include):
    """What was complete before so many tokens counts for nothing, nor does any part of it. No more is held back than
    what a stop may begin with."""
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, include_stop=include)
    detokenizer = Detokenizer(SimpleNamespace(piece=lambda token, skip: PIECES[token]), params)
    names, tail, whole, void, shown = tuple(stop.encode() for stop in stops), b"", b"", 0, ""
    decoder, text, late = codecs.getincrementaldecoder("utf-8")("replace"), "", ""
    for count, token in enumerate(tokens, 1):
        shown += detokenizer.add(token)
        whole, more = whole + PIECES[token], decoder.decode(PIECES[token])
        text, late = text + more, late + more
        found, tail = find_stop(tail, PIECES[token], names)  # as the scheduler does
        hits = [(at, index) for index, stop in enumerate(names) if (at := whole.find(stop, void)) >= 0]
        assert found == (min(hits)[1] if hits else None)
        if hits and count >= min_tokens:
            at, index = min(hits)
            rest = detokenizer.finish(stops[index])
            assert shown + rest == detokenizer.text
            assert detokenizer.text == (whole if include else whole[:at]).decode(errors="replace")
            return
        if hits:
            void, tail, late = len(whole), b"", ""
        held = max(size for stop in stops for size in range(len(stop)) if late.endswith(stop[:size]))
        assert len(shown) >= len(text) - held
    assert shown + detokenizer.finish(None) == whole.decode(errors="replace")


@pytest.mark.parametrize("stop", ["own ", "town n", "wn", " nest", "small"])
def test_text_behind_a_stop_inside_a_token_is_never_shown(tokenizer, stop):
    """The token that completes a stop may bring more text behind it."""
    detokenizer, shown = Detokenizer(tokenizer, SamplingParams(stop=(stop,))), ""
    for token in tokenizer.encode("a small town nestled").tolist():
        shown += detokenizer.add(token)
        if stop in detokenizer.text:
            break
    whole = "a small town nestled"
    assert shown + detokenizer.finish(stop) == whole[: whole.index(stop)] == detokenizer.text


CALLED = [
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": true}'}}
    ]},
]  # fmt: skip
ADD = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        # Arguments one by one, as JSON of an object, as JSON that is a text already.
        ("{% for k, v in f.arguments.items() %}<{{ k }}>{{ v | tojson }}{% endfor %}", "<a>1<b>true"),
        ("{{ f.arguments | tojson }}", '{"a": 1, "b": true}'),
        ("{{ '```' + f.arguments }}", '```{"a": 1, "b": true}'),
        ("{{ f.arguments }}", '{"a": 1, "b": true}'),
        ("{{ f.arguments if f.arguments is string else f.arguments | tojson }}", '{"a": 1, "b": true}'),
    ],
)
def test_a_template_gets_the_arguments_of_calls_as_it_takes_them(written, expected):
    source = "{{ tools and '' }}{% for m in messages %}{% for c in m.tool_calls or [] %}{% set f = c.function %}%%"
    source = source.replace("%%", written) + "{% endfor %}{% endfor %}"
    assert ChatTemplate(source, {}).render(CALLED, False, tools=ADD) == expected


def test_what_a_template_marks_for_training_is_rendered():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "a"}]) == "a;"


def test_tools_are_explained_where_a_template_has_a_place_for_text():
    """Gemma's takes nothing for the system."""
    gemma = "{% if messages and messages[0].role == 'system' %}{{ raise_exception('not supported') }}{% endif %}"
    rest = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    text = ChatTemplate(gemma + rest, {}).render([{"role": "user", "content": "Add!"}], tools=ADD)
    assert text.startswith("<user>You can call functions")
    assert text.endswith("</tool_call>\n\nAdd!")
    assert ChatTemplate(rest, {}).render([{"role": "user", "content": "Add!"}], tools=ADD).startswith("<system>")
    assert ChatTemplate(rest, {}).render([], tools=ADD).startswith("<system>")
    assert ChatTemplate(gemma + rest, {}).render([], tools=ADD).startswith("<user>You can call functions")
