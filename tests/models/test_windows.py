"""Models with sliding windows: as transformers computes them, and the same however their KV is shared and forgotten."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_families import SIZES, save_random
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, Qwen2Config, Qwen3Config

from freehold import LLM, SamplingParams

WINDOW = 24
SLIDING = {**SIZES, "sliding_window": WINDOW, "use_sliding_window": True}
CONFIGS = {
    "window only": MistralConfig(**SIZES, sliding_window=WINDOW, head_dim=32),
    "full and window": Qwen2Config(**SLIDING, max_window_layers=1),
    "window between": Qwen3Config(
        **SLIDING, head_dim=32, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
}
EXACT = {"linear_compute": "float32", "kv_cache_dtype": "float32", "audit_interval": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_random(CONFIGS[request.param], 5, torch.float32, path)
    return path


def prompts_of(counts, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 258, count).tolist() for count in counts]


def said(output) -> tuple[list[int], list[float]]:
    return output.token_ids, [entry.logprob for entry in output.logprobs]


@pytest.fixture(scope="module")
def cold(folder):
    """prompt -> what one engine says of it that shares nothing."""
    known = {}
    with LLM(str(folder), disable_radix_cache=True, max_running_requests=1, page_size=16, **EXACT) as llm:

        def ask(prompt: list[int]) -> tuple[list[int], list[float]]:
            key = tuple(prompt)
            if key not in known:
                known[key] = said(llm.generate([prompt], GREEDY)[0])
            return known[key]

        yield ask


def test_what_transformers_computes(folder):
    """Prompts longer than the window by 0, 1 more, 1 less and many more; and the window matters."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    config = AutoConfig.from_pretrained(folder)
    config.sliding_window = 400
    opened = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    prompts = prompts_of((1, 7, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 16, 100, 200))
    with LLM(str(folder), chunked_prefill_size=64, **EXACT) as llm:
        outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + output.token_ids])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
            other = opened(ids).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert float((logprobs.max(-1).values - own).max()) < 1e-4
        np.testing.assert_allclose(said(output)[1], own.numpy(), atol=2e-4)
        if len(prompt) > WINDOW:
            assert float((logits - other).abs().max()) > 0.1, "without its window the model says the same"


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_prefix_hits_batches_and_retraction_change_nothing(folder, cold, page_size):
    (base,) = prompts_of((120,), 1)
    prompts = [base + tail for tail in prompts_of((1, 5, 40), 2)] + [
        base[:70] + tail for tail in prompts_of((9, 30), 3)
    ]
    options = {"page_size": page_size, "chunked_prefill_size": 48, "forward_retract_interval": 7, **EXACT}
    with LLM(str(folder), **options) as llm:
        for _ in range(2):
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
                assert said(output) == cold(prompt)
        first = llm.generate([prompts[0]], GREEDY)[0]
        history = prompts[0] + first.token_ids
        (again,) = llm.generate([history + prompts[1][-5:]], GREEDY)
        assert said(again) == cold(history + prompts[1][-5:])
        assert again.cached_tokens >= len(history) - 1 - page_size, "the second turn computes its history again"


def test_a_row_forgets_what_it_does_not_look_at(folder):
    with LLM(str(folder), page_size=4, chunked_prefill_size=32, **EXACT) as llm:
        (request,) = llm.requests(prompts_of((100,)), replace(GREEDY, max_tokens=250))
        llm.scheduler.add(request)
        memory, most = llm.scheduler.memory, 0
        while llm.scheduler.has_work:
            llm.scheduler.step()
            if request.lease is not None and request.first_token is not None:
                for bounded in memory.tree.bounded:
                    row = memory.leases.row_pages(request.lease.row, bounded.number)
                    most = max(most, int(np.count_nonzero(row)))
        assert 0 < most <= -(-WINDOW // 4) + 3


@pytest.mark.parametrize("options", [
    {"speculative_algorithm": "ngram"},
    {"speculative_algorithm": "draft", "speculative_draft_layers": 1},
], ids=["ngram", "draft"])  # fmt: skip
def test_speculation_changes_nothing(folder, options):
    """One token is likelier than the model has it, so that drafts are right, but not always."""
    prompts, likely = prompts_of((6, 30, 90), 5), replace(GREEDY, max_tokens=80, logit_bias={5: 3.0})
    with LLM(str(folder), page_size=4, **EXACT) as llm:
        expected = [said(output) for output in llm.generate(prompts, likely)]
    assert any(set(tokens) != {5} for tokens, _ in expected)
    with LLM(str(folder), page_size=4, **options, **EXACT) as llm:
        for _ in range(2):
            assert [said(output) for output in llm.generate(prompts, likely)] == expected
        results = llm.scheduler.results
        assert 0 < results.accepted_count < results.drafted_count


def test_a_pool_for_a_few_windows_serves_many(folder, cold):
    """Far fewer pages than all prompts together have."""
    prompts = prompts_of((150,) * 12, 6)
    with LLM(str(folder), page_size=4, num_pages=160, chunked_prefill_size=32, max_running_requests=12, **EXACT) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
            assert said(output) == cold(prompt)
