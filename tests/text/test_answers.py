"""Answers are read while they arrive, and what is read does not depend on how they were cut."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from freehold.server.constraints.schemas import SchemaOptions, json_grammar
from freehold.text.answers.answer import Answer
from freehold.text.answers.events import Arguments, CallStart, Content, Reasoning
from freehold.text.answers.grammar import AnswerGrammar, ToolUse
from freehold.text.answers.parser import AnswerFormat
from freehold.text.answers.thinking import THINKING, thinking_of_template
from freehold.text.markers import MARKERS, Markers
from freehold.text.tools.formats import TOOL_FORMATS, format_of_template
from freehold.text.tools.tool import Tool

TOOLS = [
    Tool(
        "get_weather",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    Tool(
        "add",
        parameters={
            "type": "object",
            "properties": {"a": {"type": "number"}, "exact": {"type": "boolean"}, "unit": {"enum": ["m", "km"]}},
            "additionalProperties": False,
        },
    ),
]
KNOWN = {tool.name: tool for tool in TOOLS}
WEATHER = '{"name": "get_weather", "arguments": {"city": "Par\\u0069s", "days": 3}}'
ADD = '{"name": "add", "arguments": {"a": -2.5e3, "exact": true}}'
C, R = Content, Reasoning


def call(index, name, arguments):
    return [CallStart(index, name, ""), Arguments(index, arguments)]


# Format, thoughts, text of the answer, what it says.
VECTORS = [
    ("hermes", None, "Hello\n\n", [C("Hello\n\n")]),
    ("hermes", None, "", []),
    ("hermes", None, f"So.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>\nDone.",
     [C("So."), *call(0, "get_weather", '{"city": "Par\\u0069s", "days": 3}'),
      *call(1, "add", '{"a": -2.5e3, "exact": true}'), C("Done.")]),
    ("hermes", None, f"So.\n<tool_call>\n{ADD}\n</tool_call>",
     [C("So."), *call(0, "add", '{"a": -2.5e3, "exact": true}')]),
    ("hermes", None, '<tool_call>{"arguments": {"a": [1, {"x": null}]}, "id": 7, "name": "add"}</tool_call>',
     call(0, "add", '{"a": [1, {"x": null}]}')),
    ("hermes", None, '<tool_call>{"name": "add"}</tool_call>', call(0, "add", "{}")),
    ("hermes", None, 'x <tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call> y',
     [C('x <tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call> y')]),
    ("hermes", None, f"a <tool_call> b <tool_call>{ADD}</tool_call>",
     [C("a <tool_call> b"), *call(0, "add", '{"a": -2.5e3, "exact": true}')]),
    ("hermes", None, '<tool_call>{"name": "add", "arguments": "a"}</tool_call>',
     [C('<tool_call>{"name": "add", "arguments": "a"}</tool_call>')]),
    ("hermes", None, '<tool_call>\n{"name": "add", "arguments": {"a": 1', call(0, "add", '{"a": 1')),
    ("hermes", None, '<tool_call>\n{"name": "add", "arguments": {"a": tr', call(0, "add", '{"a": ')),
    ("hermes", None, "a < b <tool_c", [C("a < b <tool_c")]),
    ("hermes", "qwen3", f"<think>\nI think < b\n\n</think>\n\n<tool_call>\n{ADD}\n</tool_call>",
     [R("I think < b"), *call(0, "add", '{"a": -2.5e3, "exact": true}')]),
    ("hermes", "qwen3", "\n<think>hm</think>Yes\n", [R("hm"), C("Yes\n")]),
    ("hermes", "qwen3", "<think>never ends </thin", [R("never ends </thin")]),
    ("hermes", "qwen3", "No thoughts <think>at all</think>", [C("No thoughts <think>at all</think>")]),
    ("hermes", "qwen3", "<think>\n\n</think>\n\nYes", [C("Yes")]),
    ("hermes", "deepseek_r1", "hm\n</think>\n\nYes", [R("hm"), C("Yes")]),
    ("hermes", "deepseek_r1", "<think>\nhm</think>Yes", [R("hm"), C("Yes")]),
    ("hermes", "granite", "Here is my thought process:\nhm\nHere is my response:\nYes", [R("hm"), C("Yes")]),
    ("mistral", "mistral", "[THINK]hm[/THINK]Yes", [R("hm"), C("Yes")]),
    ("qwen25_coder", None, ADD, call(0, "add", '{"a": -2500.0, "exact": true}')),
    ("qwen25_coder", None, f"```json\n{ADD}\n{WEATHER}\n```\n",
     [*call(0, "add", '{"a": -2500.0, "exact": true}'), *call(1, "get_weather", '{"city": "Paris", "days": 3}')]),
    ("qwen25_coder", None, f"```\n{ADD}\n{ADD}\n```\n",
     [*call(0, "add", '{"a": -2500.0, "exact": true}'), *call(1, "add", '{"a": -2500.0, "exact": true}')]),
    ("qwen25_coder", None, f"<tools>[{ADD}]</tools>", call(0, "add", '{"a": -2500.0, "exact": true}')),
    ("qwen25_coder", None, '```json\n{\n  "name": "add",\n  "arguments": {\n    "a": 1\n  }\n}\n```',
     call(0, "add", '{"a": 1}')),
    ("qwen25_coder", None, f"```json\n{ADD}\n``` is it", [C(f"```json\n{ADD}\n``` is it")]),
    ("qwen25_coder", None, f"{ADD} and", [C(f"{ADD} and")]),
    ("qwen25_coder", None, '{"name": ["add"]}', [C('{"name": ["add"]}')]),
    ("qwen25_coder", None, f"<tool_call>\n{ADD}\n</tool_call>", call(0, "add", '{"a": -2.5e3, "exact": true}')),
    ("qwen3_coder", None,
     "ok\n<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\n\"York\" < \n\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
     [C("ok"), *call(0, "get_weather", '{"city": "New\\n\\"York\\" < \\n", "days": 3}')]),
    ("qwen3_coder", None, "<tool_call>\n<function=add>\n</function>\n</tool_call>", call(0, "add", "{}")),
    ("qwen3_coder", None, "<tool_call><function=add><parameter=unit>km</parameter><parameter=x>True</parameter>"
     "</function></tool_call>", call(0, "add", '{"unit": "km", "x": true}')),
    ("qwen3_coder", None, "<tool_call>\n<function=nope>\n", [C("<tool_call>\n<function=nope>\n")]),
    ("llama3_json", None, '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}',
     [*call(0, "add", '{"a": 1}'), *call(1, "add", "{}")]),
    ("llama3_json", None, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', call(0, "add", '{"a": 1}')),
    ("llama3_json", None, '{"nome": "add", "parameters": {}}', [C('{"nome": "add", "parameters": {}}')]),
    ("llama3_json", None, "Say {", [C("Say {")]),
    ("pythonic", None, "[get_weather(city='Pa, r)\\'s', days=3), add(a=[1, 2, {\"x\": None}], exact=True)]",
     [*call(0, "get_weather", '{"city": "Pa, r)\'s", "days": 3}'),
      *call(1, "add", '{"a": [1, 2, {"x": null}], "exact": true}')]),
    ("pythonic", None, "[add()]", call(0, "add", "{}")),
    ("pythonic", None, "[1, 2] is a list", [C("[1, 2] is a list")]),
    ("mistral", None, 'Hi [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {}}]',
     [C("Hi"), *call(0, "add", '{"a": 1}'), *call(1, "add", "{}")]),
    ("mistral", None, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_weather[ARGS]{"city": "x"}',
     [*call(0, "add", '{"a": 1}'), *call(1, "get_weather", '{"city": "x"}')]),
    ("deepseek_v3", None,
     'Sure<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```'
     '<｜tool▁call▁end｜>\n'
     '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
     [C("Sure"), *call(0, "add", '{"a": 1}'), *call(1, "add", '{"a": 2}')]),
    ("deepseek_v31", None,
     '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
     call(0, "add", '{"a": 1}')),
    ("mistral", None, "[TOOL_CALLS]nope[ARGS]{}", [C("[TOOL_CALLS]nope[ARGS]{}")]),
    ("deepseek_v31", None, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>nope<｜tool▁sep｜>{}",
     [C("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>nope<｜tool▁sep｜>{}")]),
    ("gpt_oss", None,
     "<|channel|>analysis<|message|>The user<|end|><|start|>assistant<|channel|>commentary to=functions.add "
     '<|constrain|>json<|message|>{"a": 1}<|call|>', [R("The user"), *call(0, "add", '{"a": 1}')]),
    ("gpt_oss", None, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello",
     [R("hm"), C("Hello")]),
    ("gpt_oss", None, "<|channel|>commentary to=functions.nope<|message|>{}<|call|>", [C("{}")]),
]  # fmt: skip
ONE_TOKEN = Markers([marker.encode() for marker in MARKERS])
AS_TEXT = Markers([])


def expected(name, thinking, markers=AS_TEXT, prompt=""):
    return AnswerFormat(TOOL_FORMATS[name], THINKING.get(thinking), markers).expecting(KNOWN, prompt)


def joined(events):
    """Neighbours of one kind as one, ids of calls left out."""
    found = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, CallStart):
            found.append(replace(event, id=""))
        elif type(last) is type(event) and getattr(last, "index", 0) == getattr(event, "index", 0):
            found[-1] = replace(last, text=last.text + event.text)
        else:
            found.append(event)
    return found


def read(how, pieces):
    parser = how.parser("x")
    return joined([event for piece in pieces for event in parser.add(piece)] + parser.finish())


def marked(text):
    """The text of an output whose markers are a token each."""
    for marker in MARKERS:
        text = text.replace(marker, ONE_TOKEN.seen(marker))
    return text


VECTOR = pytest.mark.parametrize(("name", "thinking", "text", "says"), VECTORS)


@VECTOR
def test_what_answers_say(name, thinking, text, says):
    assert read(expected(name, thinking), [text]) == says
    assert read(expected(name, thinking), text) == says
    assert read(expected(name, thinking, ONE_TOKEN), [marked(text)]) == says


@VECTOR
def test_every_cut_says_the_same(name, thinking, text, says):
    how, rng = expected(name, thinking), random.Random(text)
    for at in range(len(text)):
        assert read(how, [text[:at], text[at:]]) == says, at
        assert read(how, [text[:at]]) == read(how, text[:at]), "where the output ends early, too"
    for _ in range(100):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(9)))
        assert read(how, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == says


ALPHABET = [
    *MARKERS, *"{}[]()\":,=1 \n\\'aé", "<function=add>", "</function>", "<parameter=a>", "</parameter>", "name",
    "arguments", "parameters", "add", "get_weather", "json", "```", "assistant", "analysis", "final", "true",
    "to=functions.add", '{"name": "add", "arguments": {',
]  # fmt: skip


@settings(max_examples=300)
@given(st.sampled_from(sorted(TOOL_FORMATS)), st.sampled_from([None, *THINKING]), st.lists(st.sampled_from(ALPHABET)),
       st.booleans())  # fmt: skip
def test_whatever_a_model_writes_is_read_the_same_however_it_is_cut(name, thinking, parts, is_open):
    markers = AS_TEXT if len(parts) % 2 else ONE_TOKEN
    thoughts = THINKING.get(thinking)
    how = expected(name, thinking, markers, thoughts.opens[0] if thoughts and is_open else "")
    parts = [markers.seen(part) for part in parts]
    text = "".join(parts)
    whole = read(how, [text])
    assert whole == read(how, text) == read(how, parts)
    answer = Answer()
    answer.add(whole)
    said = answer.content + answer.reasoning + "".join(one.arguments for one in answer.calls)
    assert not any("\ud800" <= char <= "\udfff" for char in said)
    assert {one.name for one in answer.calls} <= set(KNOWN)


def test_the_same_letters_in_other_tokens_are_no_marker():
    text = f"<tool_call>{ADD}</tool_call>"
    assert read(expected("hermes", None, ONE_TOKEN), [text]) == [C(text)]


def test_thoughts_can_begin_in_the_prompt():
    assert read(expected("hermes", "qwen3", prompt="...<think>\n"), ["hm</think>Yes"]) == [R("hm"), C("Yes")]
    assert read(expected("hermes", "deepseek_r1", prompt="<think>\n\n</think>\n\n"), ["Yes"]) == [C("Yes")]
    how = AnswerFormat(TOOL_FORMATS["hermes"], THINKING["qwen3"], AS_TEXT)
    assert how.expecting({}, "", separates_thoughts=False) is None


def test_how_many_characters_were_thoughts():
    for pieces in (["<think>hm</think>\n\nYes"], "<think>hm</think>\n\nYes"):
        parser = expected("hermes", "qwen3").parser("x")
        for piece in pieces:
            parser.add(piece)
        parser.finish()
        assert parser.thoughts_end == len("<think>hm</think>")


def test_ids_of_calls():
    def ids(name, output):
        answer = Answer()
        answer.add(expected(name, None).parser(output).add(f"<tool_call>{ADD}</tool_call>[TOOL_CALLS][{ADD}, {ADD}]"))
        return [one.id for one in answer.calls]

    (plain,) = ids("hermes", "a")
    assert plain.startswith("call_")
    assert len(plain) == len("call_") + 24
    assert ids("hermes", "a") == [plain] != ids("hermes", "b")
    first, second = ids("mistral", "a")
    assert len(first) == 9
    assert first.isalnum()
    assert first != second


# -- grammars -------------------------------------------------------------------------------------------------------


class Bytes:
    """A vocabulary of bytes, and of markers if they are to be a token each."""

    def __init__(self, markers=()):
        self.tokens = [bytes([byte]) for byte in range(256)] + [one.encode() for one in markers] + [b"<end>"]
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = None
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.markers = Markers(self.tokens[:-1])
        self.shared = LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=[self.eos_token_id])

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())

    def encode(self, text):
        found, at = [], 0
        while at < len(text):
            marker = next((one for one in self.markers.tokens if text.startswith(one, at)), None)
            found += text[at].encode() if marker is None else [self.markers.tokens[marker]]
            at += len(marker or text[at])
        return found

    def decode(self, tokens):
        marks = self.markers.marks(MARKERS)
        parts = [
            marks[token].encode("utf-8", "surrogatepass") if token in marks else self.tokens[token] for token in tokens
        ]
        return b"".join(parts).decode("utf-8", "surrogatepass")


VOCABULARIES = {"tokens": Bytes(MARKERS), "text": Bytes()}
ENDS = [ord(one) for one in '"}])\n<;']


def of_schema(schema, is_lenient):
    return json_grammar(schema, SchemaOptions(is_lenient))


def matcher(words, grammar):
    found = LLMatcher(words.shared, grammar, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def follows(words, grammar, text):
    tokens = words.encode(text)
    found = matcher(words, grammar)
    return found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting()


def walk(words, grammar, rng):
    """A random text that the grammar allows; None if it became too long."""
    found, tokens = matcher(words, grammar), []
    while len(tokens) < 1500:
        bits = found.compute_bitmask()
        legal = [token for token in range(len(words.tokens)) if bits[token // 8] >> token % 8 & 1]
        if words.eos_token_id in legal and (len(legal) == 1 or rng.random() < 0.5):
            return tokens
        if rng.random() < 0.05:  # texts go on until this stands there, which chance would never write
            end = words.encode("\n</parameter>\n")
            tokens += end[: found.try_consume_tokens(end)]
            continue
        if len(legal) > 64:  # anywhere in a text
            legal = [token for token in legal if 32 <= token < 127 or token == 10 or token > 255]
        ends = [token for token in legal if token in ENDS]
        legal = [token for token in legal if token != words.eos_token_id]
        tokens.append(rng.choice(ends if ends and rng.random() < 0.4 else legal))
        assert found.consume_token(tokens[-1])
    return None


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_a_grammar_allows_is_read_as_calls(name, vocabulary, several):
    words, rng = VOCABULARIES[vocabulary], random.Random(name)
    form = AnswerFormat(TOOL_FORMATS[name], None, words.markers)
    grammar = AnswerGrammar(use=ToolUse(TOOLS, several, True)).lark(form, "", of_schema)
    seen, counts = set(), set()
    for _ in range(40):
        tokens = walk(words, grammar, rng)
        if tokens is None:
            continue
        answer = Answer()
        answer.add(read(form.expecting(KNOWN, ""), [words.decode(tokens)]))
        assert answer.calls, words.decode(tokens)
        assert not answer.content
        for one in answer.calls:
            arguments = json.loads(one.arguments)
            assert set(arguments) <= set(KNOWN[one.name].properties)
            assert one.name != "get_weather" or isinstance(arguments["city"], str)
        seen |= {one.name for one in answer.calls}
        counts.add(len(answer.calls))
    assert seen == set(KNOWN)
    assert (counts == {1}) == (not several or name == "gpt_oss")


FREE = ["Hello there", "[1] {x", "a < b", '{"a": 1}', ""]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_where_calls_are_a_choice_those_begun_are_of_known_tools(name, vocabulary):
    words = VOCABULARIES[vocabulary]
    form = AnswerFormat(TOOL_FORMATS[name], None, words.markers)
    free, forced = (
        AnswerGrammar(use=ToolUse(TOOLS, True, is_required)).lark(form, "", of_schema) for is_required in (False, True)
    )
    if form.has_channels:
        assert follows(words, free, "<|channel|>final<|message|>Hello")
    for text in () if form.has_channels else FREE:
        assert follows(words, free, text), text
        assert not follows(words, forced, text), text
    texts = [text for one, thoughts, text, says in VECTORS if one == name and not thoughts
             and any(isinstance(event, CallStart) for event in says) and isinstance(says[-1], Arguments)]  # fmt: skip
    allowed = [text for text in texts if follows(words, free, text.removesuffix("<|call|>"))]
    assert allowed, "some calls are written as the vectors have them"
    if name in ("qwen25_coder", "llama3_json"):
        assert set(texts) == set(allowed) | {text for text in texts if "<tools>" in text or "\\u" in text}, (
            "with space as they like it"
        )
    for text in allowed:
        unknown = text.replace("get_weather", "nope").replace("add", "nope")
        assert not follows(words, free, unknown) or name in ("llama3_json", "qwen25_coder"), unknown


def test_strict_tools_are_called_by_their_schema_and_others_with_any_object():
    words, form = VOCABULARIES["text"], AnswerFormat(TOOL_FORMATS["hermes"], None, AS_TEXT)
    odd = '<tool_call>\n{"name": "add", "arguments": {"b": 1}}\n</tool_call>'
    for is_strict in (True, False):
        tools = [replace(tool, is_strict=is_strict) for tool in TOOLS]
        grammar = AnswerGrammar(use=ToolUse(tools)).lark(form, "", of_schema)
        assert follows(words, grammar, odd) == (not is_strict)
        required = AnswerGrammar(use=ToolUse(tools, True, True)).lark(form, "", of_schema)
        assert not follows(words, required, odd)


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_form_binds_the_answer_and_not_the_thoughts(name, vocabulary):
    words, thinking = VOCABULARIES[vocabulary], THINKING[name]
    form, (begin, end) = AnswerFormat(TOOL_FORMATS["hermes"], thinking, words.markers), thinking.markers
    digits = AnswerGrammar(form="start: /[0-9]+/")
    for prompt, right, wrong in (
        ("", [f"{begin}\nhm{end}\n\n12", "12", f"{begin}{end}3"], ["hm12", f"{begin}hm12"]),
        (f"{begin}\n", [f"hm{end}\n\n12", f"{end}12"], ["12"]),
        (f"{begin}\n\n{end}\n\n", ["12"], [f"hm{end}12"]),
    ):
        grammar = digits.lark(form, prompt, of_schema)
        assert all(follows(words, grammar, text) for text in right), prompt
        assert not any(follows(words, grammar, text) for text in wrong), prompt


def test_thoughts_have_a_budget_where_a_token_ends_them():
    words, thinking = VOCABULARIES["tokens"], THINKING["qwen3"]
    form = AnswerFormat(TOOL_FORMATS["hermes"], thinking, words.markers)
    grammar = AnswerGrammar(thinking_budget=3).lark(form, "<think>\n", of_schema)
    assert follows(words, grammar, "hmm</think>\n\nYes")
    assert follows(words, grammar, "h</think>Yes")
    assert not follows(words, grammar, "hmmm</think>Yes")
    with pytest.raises(ValueError, match="no token"):
        AnswerGrammar(thinking_budget=3).lark(replace(form, markers=AS_TEXT), "", of_schema)


def test_a_form_and_tools():
    words, form = VOCABULARIES["text"], AnswerFormat(TOOL_FORMATS["hermes"], None, AS_TEXT)
    grammar = AnswerGrammar(form="start: /[0-9]+/", use=ToolUse(TOOLS)).lark(form, "", of_schema)
    assert follows(words, grammar, "12")
    assert follows(words, grammar, f"<tool_call>\n{ADD}\n</tool_call>")
    assert not follows(words, grammar, "Hello")
    assert AnswerGrammar().lark(form, "", of_schema) is None


# -- templates ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "model", "calls", "thoughts"),
    [
        ("{{ messages }}", "m", "hermes", None),
        ("<tool_call>", "Qwen3-8B", "hermes", None),
        ("<tool_call>", "/models/Qwen2.5-Coder-0.5B.gguf", "qwen25_coder", None),
        ("<tool_call><function=", "m", "qwen3_coder", None),
        ("<tool_call></think>", "m", "hermes", "qwen3"),
        ("<｜Assistant｜></think><｜tool▁calls▁begin｜>```json", "m", "deepseek_v3", "deepseek_r1"),
        ("<｜Assistant｜></think><｜tool▁calls▁begin｜>", "m", "deepseek_v31", "deepseek_r1"),
        ("[TOOL_CALLS][THINK]", "m", "mistral", "mistral"),
        ("<|python_tag|>", "m", "llama3_json", None),
        ("[func_name1(params_name1", "m", "pythonic", None),
        ("<|channel|>", "m", "gpt_oss", "gpt_oss"),
        ("Here is my thought process: ", "m", "hermes", "granite"),
    ],
)
def test_templates_show_how_a_model_writes(source, model, calls, thoughts):
    assert format_of_template(source, model) == calls
    assert thinking_of_template(source) == thoughts


def test_all_markers_of_formats_are_known():
    for one in (*TOOL_FORMATS.values(), *THINKING.values()):
        known = set(MARKERS) if getattr(one, "name", "") != "granite" else {*MARKERS, *one.markers}
        assert set(one.markers) <= known
