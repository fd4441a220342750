"""From the fields of a body to a grammar, and what a grammar then allows."""

import json
import time

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from freehold.contract.errors import InvalidParameter
from freehold.server.constraints.expressions import choice_grammar, regex_grammar
from freehold.server.constraints.fields import ConstraintFields, native_constraint
from freehold.server.constraints.gbnf import lark_of
from freehold.server.constraints.schemas import SchemaOptions, json_grammar, parsed
from freehold.server.constraints.tags import tag_grammar


class Bytes:
    """A tokenizer with a token for each byte."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257, eos_token=[256])


def matches(grammar: str, text: str) -> bool:
    """Whether the whole text follows the grammar."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    raw = list(text.encode())
    return matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting()


SUMS = 'root ::= expr # sums\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"'
GBNF = [
    ('root ::= "a" | "b"\n  | [c-e]+', ["a", "ccde"], ["x", ""]),
    (
        'root ::= expr # sums\nexpr ::= term ("+" term)*\nterm ::= [0-9]+ | "(" expr ")"',
        ["1+2", "(1+(2))"],
        ["1+", "()"],
    ),
    (r'root ::= "\u0041" [\u00e9-\u00ff] .', ["Aéx", "Aê\n"], ["Ae"]),
    ('root ::= "x"{2,3} [^\\n"]*', ["xx", "xxxabc"], ["x", 'xx"']),
    ('root ::= a-b\n\na-b ::= "q"? start\nstart ::= "z"', ["qz", "z"], ["q"]),
    ('root ::= "xyz" | [a-z][a-z]', ["xyz", "xy"], ["x", "abc"]),
    ('root ::= "[" [\\]\\[x/-]+ "]"', ["[x/]]", "[-]"], ["[]", "[y]"]),
    ('root ::= "a" | ', ["a", ""], ["b"]),
    ('root ::= ("a" | )"b"{2}', ["abb", "bb"], ["ab"]),
    ('root ::= "\\"\\\\" [\\^a] ', ['"\\^', '"\\a'], ['"\\b']),
    ("root ::= [\\x41-\\x43]{2,}", ["AB", "ABCA"], ["A", "AD"]),
]


@pytest.mark.parametrize(("source", "good", "bad"), GBNF)
def test_gbnf(source, good, bad):
    for text in good:
        assert matches(lark_of(source), text), text
    for text in bad:
        assert not matches(lark_of(source), text), text


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("root ::= foo", "line 1, column 10: there is no rule 'foo'"),
        ('root ::= "x"\n  ("a"', "line 2, column 3: there is no '\\)'"),
        ('root ::= "a" )', "line 1, column 14: there is no '\\('"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= "a"**', "nothing to repeat"),
        ("root ::= [b-a]", "the range b-a is empty"),
        ("root ::= 'a'", 'column 10: "\'" means nothing'),
        ('root ::= "\\q"', "no escape"),
        ('root ::= "\\x00"', "no escape"),
        ('x ::= "a"', "no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: there is a rule 'root' already"),
        ('root ::= "a"{3,2}', "smaller"),
        ('"a" root ::= "b"', "a rule must begin here"),
        ("root = a", "is no grammar"),
        ("root ::= []", "class"),
        ('root ::= (?= "a")', "means nothing|nothing to repeat"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_said_with_its_place(source, where):
    with pytest.raises(ValueError, match=where):
        lark_of(source)


def test_a_long_grammar_takes_time_in_proportion():
    rules = [f"r{i} ::= r{i + 1} " for i in range(16_000)]
    before = time.monotonic()
    lark_of("\n".join(["root ::= r0", *rules, 'r16000 ::= "a"']))
    assert time.monotonic() - before < 5


def test_lark_is_taken_as_it_is():
    assert lark_of("start: /a+/") == "start: /a+/"


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\d{3}-\w+", ["123-ab_"], ["1", "123-é", "0𝟥3-a"]),
        (r"[\d.]+/x", ["1.2/x"], ["a/x"]),
        (r"[^]a]+", ["xyz"], ["a", "]"]),
        ("a\nb", ["a\nb"], ["ab"]),
        (r"^(foo|bar)?baz$", ["foobaz", "baz"], ["xbaz"]),
        ("[[]x", ["[x"], ["x"]),
        (r"\S+\.com", ["a.com"], ["a com"]),
        (r"a\/b", ["a/b"], ["a\\/b"]),
        (r"[\s\w]+", ["a b_\n"], ["-"]),
    ],
)
def test_expressions_are_of_ascii_and_of_the_whole_text(pattern, good, bad):
    grammar = f"start: {regex_grammar(pattern)}"
    assert [text for text in good if not matches(grammar, text)] == []
    assert [text for text in bad if matches(grammar, text)] == []


def test_choices():
    grammar = "start: " + choice_grammar(['a "q"', "b"])
    assert matches(grammar, 'a "q"')
    assert not matches(grammar, "a")
    for wrong in ([], [""], ["a", 5]):
        with pytest.raises(ValueError, match="texts"):
            choice_grammar(wrong)


def test_schemas():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    open_, closed = json_grammar(schema), json_grammar(schema, SchemaOptions(is_closed=True))
    assert matches(f"start: {open_}", '{"a": 1, "b": 2}')
    assert matches(f"start: {closed}", '{"a":1}')
    assert not matches(f"start: {closed}", '{"b":1}')
    assert not matches(f"start: {json_grammar(schema, SchemaOptions(whitespace=None))}", '{"a": 1}')
    assert matches(f"start: {open_}", "{" + 8 * " " + '"a":1}')
    assert not matches(f"start: {open_}", "{" + 9 * " " + '"a":1}'), "a model could go on for ever"
    assert matches(f"start: {json_grammar(True)}", "[1]")


def test_options_of_the_grammar_are_ours():
    sneaky = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True, "whitespace_pattern": ".*"}}
    assert LLMatcher(TOKENIZER, f"start: {json_grammar(sneaky)}", log_level=0).is_error()
    assert matches(f"start: {json_grammar(sneaky, SchemaOptions(is_lenient=True))}", "[1,1]")


@pytest.mark.parametrize("wrong", ["{", "[1]", "5", "[" * 100_000])
def test_what_is_no_schema(wrong):
    with pytest.raises(ValueError, match=r"JSON|deep"):
        parsed(wrong)


TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "[x]", "schema": {"type": "null"}, "end": ""},
    ],
    "triggers": ["<f=", "[x]"],
}


def test_a_structural_tag_binds_what_follows_a_trigger():
    grammar = tag_grammar(json.dumps(TAG), SchemaOptions())
    for good in ("just text", "a <f=a>12</f> b <f=b>true</f>", "[x]null and <f", ""):
        assert matches(grammar, good), good
    for bad in ("<f=c>", "<f=a>true</f>", "[x]1", "<f=a>1"):
        assert not matches(grammar, bad), bad


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"triggers": ["<g"]}, "no structure begins"),
        ({"triggers": ["[x]"]}, "no trigger begins"),
        ({"structures": []}, "structures"),
        ({"format": {}}, "use structures and triggers"),
        ({"structures": [{"begin": ""}]}, "begin"),
    ],
)
def test_what_is_wrong_with_a_tag_is_said(change, words):
    with pytest.raises(ValueError, match=words):
        tag_grammar({**TAG, **change}, SchemaOptions())


def asked(**fields):
    return ConstraintFields.model_validate(fields).constraint()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("fields", "field", "good"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", '{"x": 1}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            "response_format.json_schema.schema",
            '{"a": 1}',
        ),
        ({"response_format": TAG}, "response_format", "<f=a>5</f>"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", '{"a": 1}'),
        ({"json_schema": "$$ANY$$"}, "json_schema", "[1]"),
        ({"regex": "a+"}, "regex", "aa"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", "a"),
        ({"grammar": "start: /b/"}, "grammar", "b"),
        ({"structural_tag": TAG}, "structural_tag", "[x]null"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", '{"a": 1}'),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", "{}"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs.choice", "b"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            "structured_outputs.json",
            '{"a":1}',
        ),
        ({"guided_json": SCHEMA}, "guided_json", '{"a": 1}'),
        ({"guided_regex": "a"}, "guided_regex", "a"),
        ({"guided_choice": ["x"]}, "guided_choice", "x"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", "a"),
    ],
)
def test_every_field_has_its_grammar(fields, field, good):
    constraint = asked(**fields)
    assert constraint.field == field
    assert matches(constraint.grammar, good)
    assert not matches(constraint.grammar, "<f=a>{")


@pytest.mark.parametrize(
    "nothing", [{}, {"response_format": {"type": "text"}}, {"regex": ""}, {"json_schema": None}, {"guided_choice": []}]
)
def test_what_asks_for_nothing(nothing):
    assert asked(**nothing) is None
    assert native_constraint({"json_schema": "", "regex": None}) is None


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf", "regex gives one already"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice", "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "one form"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be text"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "must be a JSON schema"),
        ({"json_schema": "{"}, "json_schema", "is not JSON"),
        ({"regex": "a" * 300_000}, "regex", "at most 262144"),
        ({"ebnf": "root ::= x"}, "ebnf", "line 1, column 10"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "needs one of"),
        ({"json_schema": "{}", "guided_whitespace_pattern": "x" * 300}, "guided_whitespace_pattern", "at most 200"),
    ],
)
def test_what_can_not_be_is_refused_by_its_field(fields, field, words):
    with pytest.raises(InvalidParameter, match=words) as refused:
        asked(**fields)
    assert refused.value.field == field
