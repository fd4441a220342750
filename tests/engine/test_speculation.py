"""Speculation changes nothing but the time: not the tokens, not the log-probabilities, not the distribution."""

import itertools

import numpy as np
import pytest
from exactness import DRAFT_LAYERS, always_drafting

from freehold import LLM, SamplingParams
from freehold.contract.step import KVShape, RowStart, Step
from freehold.engine.cpu import drawing
from freehold.engine.cpu.device import CpuDevice
from freehold.engine.sampler import Sampler
from freehold.engine.sequences import Sequences
from freehold.engine.speculative.draft_model import LAG_MAX, DraftModelSpeculator

CODE = "Repeat exactly.\n" + "".join(f"def f{i}(a, b):\n    return a + b * {i}\n\n" for i in range(4)) + "def f0(a"
PROMPTS = [CODE, "One, two, three. One, two, three. One,", "The capital of France is"]

# Every way to finish, greedy and sampled.
WAYS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=40),
    SamplingParams(temperature=0, max_tokens=30, stop=("return", "two, three. One, two", "Paris")),
    SamplingParams(temperature=0, max_tokens=30, stop_token_ids=(28, 30, 198), min_tokens=5),
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, seed=11, max_tokens=20, top_p=0.9, logprobs=1, frequency_penalty=0.3),
]


def run(checkpoint, **options):
    with always_drafting(), LLM(checkpoint=checkpoint, audit_interval=1, **options) as llm:
        pairs = [(prompt, way) for way in WAYS for prompt in PROMPTS]
        outputs = llm.generate([prompt for prompt, _ in pairs], [way for _, way in pairs])
        counts = llm.page_counts
        assert counts.lease == counts.pinned == counts.limbo == 0
        return [(o.token_ids, o.text, o.finish_reason, o.matched, o.logprobs) for o in outputs], llm.scheduler.results


@pytest.fixture(scope="module")
def plain(checkpoint):
    outputs, _ = run(checkpoint, disable_overlap_schedule=True, disable_radix_cache=True)
    assert {output[2] for output in outputs} == {"stop", "length"}
    return outputs


def check_cell(checkpoint, plain, algorithm, overlap, page_size, retract):
    outputs, results = run(
        checkpoint,
        speculative_algorithm=algorithm,
        speculative_draft_layers=DRAFT_LAYERS if algorithm == "draft" else None,
        disable_overlap_schedule=not overlap,
        page_size=page_size,
        forward_retract_interval=retract,
    )
    assert outputs == plain
    if algorithm is not None:
        assert results.drafted_count >= max(results.accepted_count, 1)
    if algorithm == "ngram":
        assert results.accepted_count > 5, "prompt lookup should find repeated code"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("algorithm", "overlap", "page_size", "retract"),
    [("ngram", True, 16, 0), ("draft", False, 4, 0), ("draft", True, 1, 3), ("ngram", False, 64, 3)],
)
def test_every_way_to_finish_gives_the_tokens_of_plain_decoding(
    algorithm, overlap, page_size, retract, checkpoint, plain
):
    check_cell(checkpoint, plain, algorithm, overlap, page_size, retract)


@pytest.mark.exact
@pytest.mark.timeout(1800)
def test_every_way_to_finish_in_every_cell(checkpoint, plain):
    for cell in itertools.product((None, "ngram", "draft"), (True, False), (1, 4, 16, 64), (0, 3)):
        check_cell(checkpoint, plain, *cell)
        print(f"{cell}: equal", flush=True)


def test_a_second_run_hits_as_much_of_the_prompt_with_a_draft_model(checkpoint):
    """The draft's KV is published with the target's: a hit never finds it blind, and is no shorter."""
    options = {"speculative_algorithm": "draft", "speculative_draft_layers": DRAFT_LAYERS, "page_size": 4}
    with LLM(checkpoint=checkpoint, audit_interval=1, **options) as llm:
        first = llm.generate(PROMPTS, WAYS[0])
        again = llm.generate(PROMPTS, WAYS[0])
    for one, two in zip(first, again, strict=True):
        assert one.token_ids == two.token_ids
        assert two.cached_tokens == (two.prompt_tokens - 1) // 4 * 4


@pytest.fixture
def drafting(checkpoint):
    """A row of 20 prompt tokens, 16 of them cached -> (its sequences, the draft model that works on them)."""
    sequences = Sequences(1, 128)
    start = RowStart(0, SamplingParams(temperature=0), 0, np.arange(20, dtype=np.int32), 20, (), 128, cached=16)
    sampler = Sampler(1, checkpoint.spec.vocab_size, drawing)
    speculator = DraftModelSpeculator(checkpoint, KVShape((8,), 16, 1, 128), CpuDevice(), sampler, LAG_MAX)
    sequences.start(start)
    speculator.start(start)
    speculator.update_pages([(np.zeros(2, np.int32), np.arange(2, dtype=np.int32), np.arange(1, 3, dtype=np.int32))])
    return sequences, speculator


def test_a_draft_model_computes_only_what_is_not_cached(drafting, monkeypatch):
    sequences, speculator = drafting
    computed: list[int] = []
    forward = speculator._model.forward

    def counting(tokens, batch):
        computed.append(len(tokens))
        return forward(tokens, batch)

    monkeypatch.setattr(speculator._model, "forward", counting)
    speculator.propose(sequences, np.zeros(1, np.int64), np.array([2]))
    assert computed == [4, 1], "what is not cached, then the first draft"


def test_a_draft_model_that_lags_reports_what_it_has_written(drafting):
    sequences, speculator = drafting
    speculator.propose(sequences, np.zeros(1, np.int64), np.array([1]))
    sequences.append(np.zeros(1, np.int64), np.ones(1, np.int64), np.array([7], np.int32))
    step = Step(
        number=1, rows=np.zeros(1, np.int64), starts=np.array([20]), counts=np.ones(1, np.int64),
        decodes=np.ones(1, np.bool_), samples=np.ones(1, np.bool_), drafts=np.zeros(1, np.int64),
    )  # fmt: skip
    plain = sequences.take_up(step, np.zeros((1, 0), np.int32), np.zeros(1, np.int64))
    written = speculator.follow(sequences, plain, np.zeros((1, 1), np.float32), np.array([21]))
    assert written.tolist() == [20], "nothing was drafted, so the last token is not in the draft's KV yet"


def test_sampled_tokens_have_the_distribution_of_the_logits():
    """Chi-square over many seeds: three positions, drafts that are often right, against plain sampling's
    probabilities. The sampler decides; drafts must not bias it."""
    vocab, trials = 6, 4000
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, vocab)).astype(np.float32)
    likely = logits.argmax(axis=1).astype(np.int32)
    sampler = Sampler(1, vocab, drawing)
    counts = np.zeros((3, vocab))
    for seed in range(trials):
        params = SamplingParams(temperature=1.0, seed=seed)
        sampler.start(RowStart(0, params, seed, np.zeros(1, np.int32), 1, (), 100))
        tokens, got, _ = sampler.sample(np.array([0]), np.array([1]), logits.copy(), likely[None, :2], np.array([2]))
        assert len(tokens) == got[0]
        assert all(token == likely[j] for j, token in enumerate(tokens[:-1])), "went on after a wrong draft"
        for j, token in enumerate(tokens):
            counts[j, token] += 1
    for j in range(3):
        total = counts[j].sum()
        weights = np.exp(logits[j] - logits[j].max())
        expected = weights / weights.sum() * total
        chi_square = float(((counts[j] - expected) ** 2 / expected).sum())
        assert chi_square < 20.5, f"position {j}: {counts[j]} of {expected}"  # p = 0.001 at 5 degrees of freedom
