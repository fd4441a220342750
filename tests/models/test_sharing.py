"""Every kind of model says the same however its tokens are shared, forgotten, retracted and drafted."""

from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest
from tiny_models import TINY_MODELS, WINDOW, prompts_of

from engine.exactness import always_drafting
from freehold import LLM, SamplingParams
from freehold.scheduler.request import Request
from freehold.scheduler.speculation import DraftBudget
from freehold.server.sessions.conversation import Conversation

# Page sizes take turns in `make test`: `make exact` has all of them for each.
PAGE_SIZES = [1, 4, 16, 64, 256]
KINDS = ["mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo3", "gpt-oss", "smollm3", "qwen3-moe", "deepseek-v2",
         "deepseek-v3", "minicpm3", "mamba2", "lfm2", "falcon-h1", "granite4", "qwen3-next", "qwen3.5"]  # fmt: skip
CASES = [
    pytest.param(name, size, marks=() if at % 5 == number % 5 else pytest.mark.exact, id=f"{name}-{size}")
    for number, name in enumerate(KINDS)
    for at, size in enumerate(PAGE_SIZES)
]
EXACT = {"linear_compute": "float32", "kv_cache_dtype": "float32", "audit_interval": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=0)


def said(output) -> tuple[list[int], list[float]]:
    return output.token_ids, [entry.logprob for entry in output.logprobs]


@pytest.fixture(scope="module")
def folders(folders):
    """As options have them."""
    return lambda name: str(folders(name))


@pytest.fixture(scope="module")
def cold(folders):
    """(family, prompt) -> what an engine says of it that shares nothing."""
    known, engines = {}, {}

    def ask(name: str, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[list[int], list[float]]:
        key = (name, tuple(prompt), params.max_tokens)
        if name not in engines:
            options = {"disable_radix_cache": True, "max_running_requests": 1, "page_size": 16}
            engines[name] = LLM(folders(name), **options, **EXACT)
        if key not in known:
            known[key] = said(engines[name].generate([prompt], params)[0])
        return known[key]

    yield ask
    for llm in engines.values():
        llm.close()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "page_size"), CASES)
def test_prefix_hits_batches_and_retraction(name, page_size, folders, cold):
    """Prompts around the window's length, and longer; the second turn goes on where the first ended."""
    (base,) = prompts_of((120,), 1)
    prompts = [base + tail for tail in prompts_of((1, 40), 2)] + [base[:70] + tail for tail in prompts_of((30,), 3)]
    prompts += prompts_of((WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + page_size), 4)
    options = {"page_size": page_size, "chunked_prefill_size": 48, "forward_retract_interval": 7, **EXACT}
    with LLM(folders(name), **options) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
                assert said(output) == cold(name, prompt)
        first = llm.generate([prompts[0]], GREEDY)[0]
        history = prompts[0] + first.token_ids
        (again,) = llm.generate([history + prompts[1][-5:]], GREEDY)
        assert said(again) == cold(name, history + prompts[1][-5:])
        assert again.cached_tokens >= len(history) - 1 - page_size, "the second turn computes its history again"


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "page_size"), CASES)
def test_conversations_with_forks_and_rewinds(name, page_size, folders, cold):
    rng, short = np.random.default_rng(page_size), replace(GREEDY, max_tokens=6)
    conversations = [Conversation()]
    with LLM(folders(name), page_size=page_size, chunked_prefill_size=32, **EXACT) as llm:
        for number in range(14):
            at = int(rng.integers(len(conversations)))
            conversation = conversations[at]
            match rng.integers(4):
                case 0 if len(conversations) < 4:
                    conversations.append(conversation)
                case 1:
                    conversation = conversation.rewound(int(rng.random() * conversation.length))
                case 2:
                    llm.scheduler.memory.tree.evictor.evict(3, "a test")
            whole = conversation.begin(rng.integers(2, 258, int(rng.integers(1, 30)), np.int32))
            request = Request(f"turn-{number}", whole, short, session=f"c{at}")
            llm.scheduler.add(request)
            while request.finish is None or llm.scheduler.has_work:
                llm.scheduler.step()
            assert request.output.tolist() == cold(name, whole.tolist(), short)[0]
            conversations[at] = conversation.after(whole, request.output.tolist())
        llm.scheduler.memory.audit()


SPECULATION = {
    "ngram": {"speculative_algorithm": "ngram"},
    "layers": {"speculative_algorithm": "draft", "speculative_draft_layers": 1},
    "other": {"speculative_algorithm": "draft"},
}
SPECULATING = [
    pytest.param(name, size, how, marks=() if at == number % 6 else pytest.mark.exact, id=f"{name}-{size}-{how}")
    for number, name in enumerate(KINDS)
    for at, (how, size) in enumerate(product(("ngram", "other" if TINY_MODELS[name].states else "layers"), (1, 4, 64)))
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "page_size", "how"), SPECULATING)
def test_speculation_changes_nothing(name, page_size, how, folders):
    """One token is likelier than the model has it, more and more, until drafts are right, but not always."""
    prompts, options = prompts_of((6, 30, 90), 5), dict(SPECULATION[how])
    if how == "other":
        options["speculative_draft_model_path"] = folders("llama")
    plain = LLM(folders(name), page_size=16, **EXACT)
    drafting = LLM(folders(name), page_size=page_size, forward_retract_interval=17, **options, **EXACT)
    results = drafting.scheduler.results
    with plain, drafting, always_drafting():
        for bias in (2.0, 3.0, 4.0, 1.0, 5.0, 2.5, 3.5, 6.0, 0.5, 8.0):
            accepted, drafted = results.accepted_count, results.drafted_count
            params = replace(GREEDY, max_tokens=50, logit_bias={5: bias})
            expected = [said(output) for output in plain.generate(prompts, params)]
            for _ in range(2):
                assert [said(output) for output in drafting.generate(prompts, params)] == expected
            if 0 < results.accepted_count - accepted < results.drafted_count - drafted:
                return
    raise AssertionError("with no bias some drafts were right and others wrong")


@pytest.mark.parametrize("name", ["lfm2", "mamba2"])
def test_turns_beside_a_draft_model_that_rests(name, folders, cold):
    """While nothing is drafted its KV would lag. A state can't: what a turn leaves behind goes on from it."""
    options = {"speculative_algorithm": "draft", "speculative_draft_model_path": folders("llama"), **EXACT}
    rng, short, conversation = np.random.default_rng(1), replace(GREEDY, max_tokens=6), Conversation()
    resting = mock.patch.object(DraftBudget, "choose", lambda budget, rows, step_tokens: np.zeros(len(rows), np.int64))
    with LLM(folders(name), page_size=64, disable_overlap_schedule=True, **options) as llm, resting:
        for number in range(5):
            whole = conversation.begin(rng.integers(2, 258, 9, np.int32))
            request = Request(f"turn-{number}", whole, short, session="c")
            llm.scheduler.add(request)
            while request.finish is None or llm.scheduler.has_work:
                llm.scheduler.step()
            assert request.output.tolist() == cold(name, whole.tolist(), short)[0]
            assert number == 0 or (request.cached_tokens or 0) >= len(whole) - 9 - 1
            conversation = conversation.after(whole, request.output.tolist())


@pytest.mark.parametrize("name", ["mistral", "gemma3", "mamba2", "qwen3-next"])
def test_a_row_forgets_what_it_does_not_look_at(name, folders):
    with LLM(folders(name), page_size=4, chunked_prefill_size=32, **EXACT) as llm:
        (request,) = llm.requests(prompts_of((100,)), replace(GREEDY, max_tokens=250))
        llm.scheduler.add(request)
        memory, most = llm.scheduler.memory, 0
        while llm.scheduler.has_work:
            llm.scheduler.step()
            if request.lease is not None and request.first_token is not None:
                for bounded in memory.tree.bounded:
                    row = memory.leases.row_pages(request.lease.row, bounded.number)
                    most = max(most, int(np.count_nonzero(row)))
        assert 0 < most <= (3 if TINY_MODELS[name].states else -(-WINDOW // 4) + 3)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gemma3", "mamba2", "falcon-h1"])
def test_a_pool_for_a_few_serves_many(name, folders, cold):
    """Far fewer pages than all prompts together have."""
    prompts = prompts_of((150,) * 12, 6)
    options = {"page_size": 4, "num_pages": 160, "chunked_prefill_size": 32, "max_running_requests": 12}
    with LLM(folders(name), **options, **EXACT) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            assert said(output) == cold(name, prompt)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["gemma2", "deepseek-v3", "falcon-h1"])
def test_smaller_numbers_in_the_cache(name, kind, folders):
    """Other tokens than with float32, perhaps, but the same whatever is shared."""
    options = {**EXACT, "kv_cache_dtype": kind}
    prompts = [prompts_of((120,), 1)[0] + tail for tail in prompts_of((1, 40), 2)]
    with LLM(folders(name), disable_radix_cache=True, max_running_requests=1, page_size=16, **options) as llm:
        expected = [said(llm.generate([prompt], GREEDY)[0]) for prompt in prompts]
    with LLM(folders(name), page_size=4, forward_retract_interval=7, **options) as llm:
        for _ in range(2):
            assert [said(output) for output in llm.generate(prompts, GREEDY)] == expected
