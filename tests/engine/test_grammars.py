"""Constrained output: every way of computing it gives the tokens of a cold loop that replays a fresh matcher."""

import json
import time

import numpy as np
import pytest
from exactness import always_drafting
from jsonschema import validate

from freehold import LLM, SamplingParams
from freehold.contract.constraint import GRAMMAR_BYTES_MAX, Constraint
from freehold.contract.errors import InvalidParameter, Unavailable
from freehold.contract.step import RowStart
from freehold.engine.grammar import compiler
from freehold.engine.grammar.compiler import Grammars
from freehold.engine.grammar.matchers import Matchers
from freehold.engine.sequences import Sequences, Work
from freehold.engine.speculative.draft_model import DraftModelSpeculator
from freehold.text.answers.grammar import AnswerGrammar, ToolUse
from freehold.text.answers.parser import AnswerFormat
from freehold.text.markers import Markers
from freehold.text.tools.formats import TOOL_FORMATS
from freehold.text.tools.tool import Tool

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "id": {"type": "string", "format": "uuid"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "id", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": r"[ \n\t]{1,8}"},
}
TOOLS = [
    Tool("find", parameters={"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}},
                             "required": ["name"], "additionalProperties": False}),
    Tool("wait", parameters={"type": "object", "properties": {"days": {"type": "integer", "maximum": 99}},
                             "additionalProperties": False}),
]  # fmt: skip
CALLS = AnswerGrammar(use=ToolUse(TOOLS, True, True)).lark(
    AnswerFormat(TOOL_FORMATS["hermes"], None, Markers([])), "", lambda schema, _: f"%json {json.dumps(schema)}"
)
GRAMMARS = {
    "tools": Constraint(CALLS, "tools"),
    "schema": Constraint(f"start: %json {json.dumps(SCHEMA)}", "json_schema"),
    "open": Constraint("start: /[a-z]+( [a-z]+)*/", "regex"),
    "sums": Constraint('start: e\ne: N | e "+" e | "(" e ")"\nN: /[0-9]{1,3}/', "ebnf"),
}
PROMPT = "Alice Smith is thirty years old and likes red and green. As JSON:"
LENGTH = 90
SEEDS = (None, 5)


def params(kind, seed=None, **options):
    how = {"temperature": 0} if seed is None else {"temperature": 0.8, "top_p": 0.95, "seed": seed}
    return SamplingParams(**{"max_tokens": LENGTH, "constraint": GRAMMARS[kind], **how, **options})


class Replayed(Matchers):
    """Keeps no matcher: each mask comes from a fresh one that has consumed the whole output."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.outputs = {}

    def start(self, start):
        super().start(start)
        self.outputs[start.row] = start.tokens[start.prompt_length :].tolist()

    def advance(self, rows, counts, tokens):
        ends = np.cumsum(counts)
        for row, count, end in zip(rows.tolist(), counts.tolist(), ends.tolist(), strict=True):
            self.outputs[row] += tokens[end - count : end].tolist()
            bound = self._rows[row]
            if bound is not None:
                bound.matcher, bound.output = None, list(self.outputs[row])


@pytest.fixture(scope="module")
def cold():
    """The tokens of one request at a time, without overlap, cache, drafts or a matcher that lives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("freehold.engine.runner.Matchers", Replayed)
        with LLM(page_size=16, num_pages=100, disable_radix_cache=True, disable_overlap_schedule=True) as llm:
            found = {
                (kind, seed): llm.generate([PROMPT], [params(kind, seed)])[0] for kind in GRAMMARS for seed in SEEDS
            }
    return {**{key: one.token_ids for key, one in found.items()}, "text": {key: one.text for key, one in found.items()}}


def test_what_the_cold_loop_gives_follows_the_grammar(cold):
    validate(json.loads(cold["text"]["schema", None]), SCHEMA)
    assert cold["text"]["open", None].replace(" ", "").isalpha()
    assert len(cold["open", None]) == LENGTH, "an open grammar goes on"


EXACT = pytest.mark.exact
OPTIONS = [
    pytest.param({}, id="default"),
    pytest.param({"disable_overlap_schedule": True, "page_size": 1}, id="synchronous-1"),
    pytest.param({"chunked_prefill_size": 5, "page_size": 4}, id="chunks-4"),
    pytest.param(
        {"forward_retract_interval": 3, "speculative_algorithm": "ngram", "page_size": 4}, id="retract-ngram-4"
    ),
    pytest.param({"speculative_algorithm": "draft", "speculative_draft_layers": 10}, id="draft"),
    pytest.param({"disable_forced_tokens": True, "page_size": 4}, id="one-by-one-4"),
    pytest.param({"page_size": 64}, id="64", marks=EXACT),
    pytest.param({"page_size": 256, "num_pages": 12}, id="256", marks=EXACT),
    pytest.param({"speculative_algorithm": "ngram"}, id="ngram", marks=EXACT),
    pytest.param({"forward_retract_interval": 3}, id="retract", marks=EXACT),
    pytest.param(
        {"forward_retract_interval": 3, "speculative_algorithm": "draft", "speculative_draft_layers": 10},
        id="retract-draft",
        marks=EXACT,
    ),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_way_gives_the_tokens_of_the_cold_loop(cold, options):
    with LLM(**{"num_pages": 300, **options}) as llm:
        wanted = [(kind, seed) for kind in GRAMMARS for seed in SEEDS]
        free = [SamplingParams(temperature=0, max_tokens=20)] * 2  # beside rows that nothing binds
        outputs = llm.generate([PROMPT] * (len(wanted) + 2), [params(*one) for one in wanted] + free)
        again = llm.generate([PROMPT] * len(wanted), [params(*one) for one in wanted])
        for one, output, second in zip(wanted, outputs, again, strict=False):
            assert output.token_ids == cold[one], one
            assert second.token_ids == cold[one], one
        (alone,) = llm.generate([PROMPT], free[:1])
        assert outputs[-1].token_ids == outputs[-2].token_ids == alone.token_ids


def test_a_document_ends_with_stop_whatever_the_request_ignores(cold):
    with LLM(num_pages=100) as llm:
        plain, ignoring, least = llm.generate(
            [PROMPT] * 3, [params("schema"), params("schema", ignore_eos=True), params("schema", min_tokens=LENGTH)]
        )
        assert plain.finish_reason == ignoring.finish_reason == least.finish_reason == "stop"
        assert plain.token_ids == ignoring.token_ids == least.token_ids
        eager = dict.fromkeys(llm.tokenizer.eos_tokens, 100.0)  # wants to end as soon as it may
        (open_,) = llm.generate([PROMPT], [params("open", ignore_eos=True, max_tokens=30, logit_bias=eager)])
        assert (open_.finish_reason, len(open_.token_ids)) == ("length", 30)
        (short,) = llm.generate([PROMPT], [params("open", max_tokens=30, logit_bias=eager)])
        assert short.finish_reason == "stop"


def test_log_probabilities_are_those_of_the_model():
    """As if nothing had been bound: scoring the output as a prompt gives the same numbers."""
    with LLM(num_pages=100) as llm:
        (output,) = llm.generate([PROMPT], [params("schema", logprobs=2)])
        prompt = llm.tokenizer.encode(PROMPT).tolist()
        whole = [*prompt, *output.token_ids]
        scoring = SamplingParams(temperature=0, max_tokens=1, logprobs=2, prompt_logprobs_start=len(prompt) - 1)
        (scored,) = llm.generate([whole], [scoring])
        assert scored.prompt_logprobs == output.logprobs
        assert any(one.top[0][0] != one.token for one in output.logprobs), "some best tokens were not legal"


def test_a_row_whose_grammar_fails_is_computed_no_further(monkeypatch):
    """Steps in flight know nothing of it: their pages may be somebody else's by then."""
    seen = []

    def fill(self, row, words, chain):
        filled(self, row, words, chain)
        if row.matcher is not None and len(seen) == 6:
            row.failure = "told to fail"

    def take_up(self, step, drafts, proposed):
        work = taken_up(self, step, drafts, proposed)
        seen.append((work.rows.tolist(), work.counts.tolist()))
        return work

    filled, taken_up = Matchers._fill, Sequences.take_up
    with LLM(num_pages=60, max_running_requests=2) as llm:
        monkeypatch.setattr(Matchers, "_fill", fill)
        monkeypatch.setattr(Sequences, "take_up", take_up)
        (failed,) = llm.generate([PROMPT], [params("open")])
        assert failed.finish_reason == "error"
        assert len(failed.token_ids) == 5
        assert len(seen) == 7, "one step was in flight"
        assert seen[5][1] == [1]
        assert seen[6][1] == [0]


# -- compiling ------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer with a token for each byte."""

    pieces = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special = frozenset({256})
    eos_tokens = (256,)
    bos_token = None
    marker_tokens = ()

    def encode(self, text, add_special_tokens=True):
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def grammars(timeout=5.0, cache_bytes=1 << 20) -> Grammars:
    return Grammars(Letters(), 260, timeout, cache_bytes)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("start: /a(?=b)/", "look-around"),
        ('start: %json {"uniqueItems": true}', "uniqueItems"),
        ("start: foo", "unknown name"),
        ("start: /((a{100}){100}){100}/", "too many"),
        ("start: /a{100000}/", "too many|fuel|large"),
        ("start: " + "x" * GRAMMAR_BYTES_MAX, "256 KiB"),
        ("begin: /a/", "start"),
    ],
)
def test_what_can_not_be_compiled_is_said_by_its_field(grammar, words):
    source = grammars()
    for _ in range(2):  # failures are kept
        before = time.monotonic()
        with pytest.raises(InvalidParameter, match=words) as refused:
            source.result(Constraint(grammar, "ebnf"))
        assert refused.value.field == "ebnf"
        assert time.monotonic() - before < 2


def test_a_grammar_is_compiled_once_and_forgotten_when_many_others_came():
    source = grammars(cache_bytes=3 * compiler.GRAMMAR_BYTES)
    first = source.result(Constraint("start: /a+/", "regex"))
    assert source.result(Constraint("start: /a+/", "other")) is first
    for number in range(3):
        source.result(Constraint(f"start: /b{{{number + 1}}}/", "regex"))
    again = source.result(Constraint("start: /a+/", "regex"))
    assert again is not first
    assert first.matcher().try_consume_tokens([97, 97, 98]) == 2, "who has it keeps it"


def test_two_rows_share_no_state():
    source = grammars()
    compiled = source.result(Constraint("start: /ab/", "regex"))
    one, two = compiled.matcher(), compiled.matcher()
    assert one.consume_token(97)
    assert two.try_consume_tokens([97, 98]) == 2


def work_of(chains) -> Work:
    """A step that samples in a row for each of `chains`, behind its drafts."""
    proposed = np.array([len(chain) for chain in chains])
    drafts = np.zeros((len(chains), max(proposed)), np.int32)
    for i, chain in enumerate(chains):
        drafts[i, : len(chain)] = chain
    rows, one = np.arange(len(chains)), np.ones(len(chains), np.int64)
    return Work(rows, one, one, one.astype(bool), proposed, drafts, np.zeros(0, np.int32), rows, np.zeros(0, np.int64))


def test_each_draft_has_the_mask_of_what_stands_before_it():
    """Rows in one batch, with drafts of their own; each mask is that of a matcher that consumed them one by one."""
    source = grammars()
    texts = ["abcd", "xy", "hello", ""]
    matchers = Matchers(len(texts), 260, Letters.eos_tokens)
    for row, text in enumerate(texts):
        compiled = source.result(Constraint(f"start: /{text}[0-9]*/", "regex"))
        nothing = np.zeros(0, np.int32)
        matchers.start(RowStart(row, SamplingParams(), 0, nothing, 100, (), 1 << 30, grammar=compiled))
    pending = matchers.begin(work_of([list(text.encode()) for text in texts]))
    masks = pending.result()
    for row, text in enumerate(texts):
        matcher = source.result(Constraint(f"start: /{text}[0-9]*/", "regex")).matcher()
        for offset in range(len(text) + 1):
            expected = np.frombuffer(matcher.compute_bitmask(), np.uint32)
            assert np.array_equal(masks.of(row, offset), expected), (text, offset)
            assert offset == len(text) or matcher.consume_token(text.encode()[offset])


def test_a_row_that_starts_again_goes_on_behind_its_earlier_output():
    compiled, matchers = grammars().result(Constraint("start: /abcd/", "regex")), Matchers(1, 260, Letters.eos_tokens)
    known = np.frombuffer(b"a promptab", np.uint8).astype(np.int32)
    matchers.start(RowStart(0, SamplingParams(), 0, known, len(b"a prompt"), (), 1 << 30, grammar=compiled))
    masks = matchers.begin(work_of([[]])).result()
    assert legal(masks.of(0, 0)) == {ord("c")}


def test_after_the_end_all_tokens_that_end_a_text_are_legal():
    """Two of them are in one word of the mask."""
    compiled, matchers = grammars().result(Constraint("start: /ab/", "regex")), Matchers(1, 260, (256, 257))
    matchers.start(RowStart(0, SamplingParams(), 0, np.zeros(0, np.int32), 100, (), 1 << 30, grammar=compiled))
    matchers.begin(work_of([[]])).result()
    matchers.advance(np.zeros(1, np.int64), np.array([3]), np.array([97, 98, 256], np.int32))
    assert legal(matchers.begin(work_of([[]])).result().of(0, 0)) == {256, 257}


def legal(words) -> set[int]:
    return {token for token in range(260) if words[token // 32] >> (token % 32) & 1}


def started(*texts) -> Matchers:
    """A row for each expression, that has begun to sample."""
    source, matchers = grammars(), Matchers(len(texts), 260, Letters.eos_tokens)
    for row, text in enumerate(texts):
        compiled = None if text is None else source.result(Constraint(f"start: /{text}/", "regex"))
        start = RowStart(row, SamplingParams(), 0, np.zeros(0, np.int32), 100, (), 1 << 30, grammar=compiled)
        matchers.start(start)
    assert not matchers.forced(np.arange(len(texts)), np.full(len(texts), 8))[1].any(), "nothing is known yet"
    matchers.begin(work_of([[] for _ in texts])).result()
    return matchers


def test_what_a_grammar_leaves_no_choice_about_is_drafted():
    matchers = started("abcdef[0-9]", None, "[xy]z", "ab")
    rows, limits = np.arange(4), np.array([4, 4, 4, 4])
    tokens, counts = matchers.forced(rows, limits)
    assert counts.tolist() == [4, 0, 0, 2]
    assert bytes(tokens[0].tolist()) == b"abcd"
    matchers.advance(rows[:1], np.array([5]), np.frombuffer(b"abcde", np.uint8).astype(np.int32))
    tokens, counts = matchers.forced(rows[:1], limits[:1])
    assert (counts.tolist(), tokens[0, 0]) == ([1], ord("f"))
    assert matchers.forced(rows, np.zeros(4, np.int64))[1].tolist() == [0, 0, 0, 0]


def test_guesses_are_cut_to_what_is_legal():
    matchers = started("[a-c]+", None, "x")
    drafts = np.frombuffer(b"abzazzzaab", np.uint8)[:9].reshape(3, 3).astype(np.int32)
    assert matchers.cut(np.arange(3), drafts, np.array([3, 3, 3])).tolist() == [2, 3, 0]
    assert matchers.cut(np.arange(3), drafts, np.array([1, 0, 0])).tolist() == [1, 0, 0]


def test_a_draft_model_has_been_fed_what_it_counts_as_written(monkeypatch):
    """Forced tokens are drafts, too, but not its own: it has to catch up with them."""
    fed, seen = {}, []

    def start(self, begin):
        fed[begin.row] = dict(enumerate(begin.tokens[: begin.cached].tolist()))
        started(self, begin)

    def forward(self, rows, starts, counts, tokens):
        ends = np.cumsum(counts)
        for row, first, count, end in zip(rows.tolist(), starts.tolist(), counts.tolist(), ends.tolist(), strict=True):
            fed.setdefault(row, {}).update(enumerate(tokens[end - count : end].tolist(), first))
        return forwarded(self, rows, starts, counts, tokens)

    def follow(self, sequences, work, hidden, written):
        found = followed(self, sequences, work, hidden, written)
        for row, count in zip(work.rows.tolist(), found.tolist(), strict=True):
            assert [fed[row].get(at) for at in range(count)] == sequences.tokens[row, :count].tolist()
        seen.append(int(work.proposed.sum()))
        return found

    started, forwarded, followed = (getattr(DraftModelSpeculator, name) for name in ("start", "_forward", "follow"))
    with always_drafting(), LLM(num_pages=100, speculative_algorithm="draft", speculative_draft_layers=10) as llm:
        for name, method in (("start", start), ("_forward", forward), ("follow", follow)):
            monkeypatch.setattr(DraftModelSpeculator, name, method)
        llm.generate([PROMPT, PROMPT], [params("schema"), SamplingParams(temperature=0, max_tokens=30)])
    assert max(seen) > 2, "something was drafted"


def test_forced_tokens_save_steps():
    def steps(**options):
        ran = []
        with always_drafting(), LLM(num_pages=100, **options) as llm, pytest.MonkeyPatch.context() as patch:
            taken_up = Sequences.take_up
            patch.setattr(Sequences, "take_up", lambda *given: ran.append(1) or taken_up(*given))
            llm.generate([PROMPT], [params("schema")])
        return len(ran)

    assert steps() < 0.9 * steps(disable_forced_tokens=True)


def test_a_compiler_may_wait_long_for_a_processor(monkeypatch):
    compiling = Grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda *given: time.sleep(0.5) or compiling(*given))
    assert grammars(timeout=0.2).result(Constraint("start: /a/", "regex")).field == "regex"


def test_a_compiler_that_hangs_is_left_behind(monkeypatch):
    hanging = Grammars._compile

    def slow(self, constraint):
        if "hang" in constraint.grammar:
            time.sleep(3.0)  # longer than it may take
        return hanging(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", slow)
    source = grammars(timeout=0.2)
    stuck = source.get(Constraint("start: /hang/", "regex"))
    behind = source.get(Constraint("start: /a/", "regex"))
    while not stuck.done():
        time.sleep(0.02)
        source.settle()
    with pytest.raises(InvalidParameter, match=r"regex: takes longer than 0.2 s"):
        stuck.result()
    assert behind.result(1).field == "regex", "it went to another thread"
    with pytest.raises(InvalidParameter, match="takes longer"):
        source.result(Constraint("start: /hang/", "regex"))
    with pytest.raises(InvalidParameter, match="takes longer"):
        source.result(Constraint("start: /hanging/", "regex"))
    with pytest.raises(Unavailable):
        source.get(Constraint("start: /b/", "regex"))
    time.sleep(3.1)  # until it has ended all the same
    assert source.result(Constraint("start: /b/", "regex")).field == "regex"


@pytest.mark.parametrize("method", ["compute_ff_tokens", "validate_tokens", "unsafe_compute_mask_ptr", "try_consume"])
def test_a_matcher_that_panics_ends_its_row_and_no_other(method):
    """What a library in Rust raises is no Exception."""

    class Panicking:
        def __init__(self, matcher):
            self._matcher = matcher

        def __getattr__(self, name):
            if name.startswith(method):
                raise BaseException("panicked")
            return getattr(self._matcher, name)

    compiled = grammars().result(Constraint("start: /abc*/", "regex"))
    matchers = Matchers(2, 257, (256,))
    for row in range(2):
        matchers.start(RowStart(row, SamplingParams(), 0, np.zeros(1, np.int32), 1, (), 1 << 30, grammar=compiled))
    rows, ones = np.arange(2), np.ones(2, np.int64)
    assert not matchers.begin(work_of([(), ()])).result(10).refused
    matchers._rows[0].matcher = Panicking(matchers._rows[0].matcher)
    forced, counts = matchers.forced(rows, 2 * ones)
    assert forced[1, : counts[1]].tolist() == [97, 98]
    assert matchers.cut(rows, np.array([[97], [97]], np.int32), ones)[1] == 1
    matchers.advance(rows, ones, np.array([97, 97], np.int32))
    assert list(matchers.begin(work_of([(), ()])).result(10).refused) == [0]
    assert "panicked" in (matchers._rows[0].failure or "")


def test_a_compiler_that_panics_goes_on(monkeypatch):
    compiling = Grammars._compile

    def panic(self, constraint):
        if "panic" in constraint.grammar:
            raise BaseException("panicked")
        return compiling(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", panic)
    source = grammars()
    with pytest.raises(InvalidParameter, match="panicked"):
        source.result(Constraint("start: /panic/", "regex"))
    assert source.result(Constraint("start: /a/", "regex")).field == "regex"
