"""Embeddings are the final hidden states that transformers computes, however prompts are cut, cached and taken back."""

import numpy as np
import pytest
import torch
import transformers
from tiny_models import prompts_of

from freehold import LLM, SamplingParams
from freehold.contract.errors import InvalidParameter

EXACT = {"linear_compute": "float32", "kv_cache_dtype": "float32", "audit_interval": 2}


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mamba2"])
def test_embeddings_are_those_of_transformers(folders, family):
    prompts = prompts_of([1, 17, 90])
    model = transformers.AutoModel.from_pretrained(folders(family), dtype=torch.float32).eval()
    with torch.no_grad():
        states = [model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in prompts]
    with LLM(str(folders(family)), **EXACT) as llm:
        expected = {"last": [one[-1] for one in states], "mean": [one.mean(axis=0) for one in states]}
        for pooling, vectors in expected.items():
            for found, wanted in zip(llm.embed(prompts, pooling), vectors, strict=True):
                assert np.abs(found - wanted).max() < 2e-4


@pytest.mark.parametrize(
    ("page_size", "options"),
    [
        (1, {"chunked_prefill_size": 7}),
        (4, {"chunked_prefill_size": 5, "forward_retract_interval": 3}),
        (16, {"disable_overlap_schedule": True, "num_pages": 24}),
        (64, {"speculative_algorithm": "ngram"}),
    ],
)
def test_embeddings_do_not_depend_on_chunks_hits_retractions_and_neighbours(folders, page_size, options):
    base = str(folders("qwen3"))
    shared, *others = prompts_of([70, 30, 5, 41])
    prompts = [shared, *others, [*shared, 9, 9], shared]
    with LLM(base, disable_radix_cache=True, max_running_requests=1, **EXACT) as llm:
        cold = {pooling: [llm.embed([one], pooling)[0] for one in prompts] for pooling in ("last", "mean")}
    with LLM(base, max_running_requests=4, page_size=page_size, **options, **EXACT) as llm:
        for _ in range(2):
            for pooling, expected in cold.items():
                for found, wanted in zip(llm.embed(prompts, pooling), expected, strict=True):
                    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
        generated = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert [len(output.token_ids) for output in generated] == [8] * len(prompts)


def test_only_the_mean_computes_what_is_cached(folders):
    (prompt,) = prompts_of([100])
    with LLM(str(folders("qwen3")), **EXACT) as llm:
        llm.embed([prompt])
        cached = {}
        for pooling in ("last", "mean"):
            (request,) = llm.requests([prompt], SamplingParams(max_tokens=1, temperature=0, pooling=pooling))
            llm.scheduler.add(request)
            while llm.scheduler.requests:
                llm.scheduler.step()
            cached[pooling] = request.cached_tokens
        assert cached == {"last": 96, "mean": 0}
        # Its output, if there is more, is no part of it.
        (request,) = llm.requests(
            [prompt], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, pooling="mean")
        )
        llm.scheduler.add(request)
        while llm.scheduler.requests:
            llm.scheduler.step()
        np.testing.assert_allclose(request.embedding, llm.embed([prompt], "mean")[0], rtol=1e-6, atol=1e-7)
        with pytest.raises(InvalidParameter, match="pooling"):
            llm.embed([prompt], "max")


def test_an_embedding_is_its_own_while_others_end_beside_it(folders):
    """A stop is found one step late: the step that runs meanwhile has a row too many."""
    prompts = prompts_of([20, 90])
    with LLM(str(folders("qwen3")), chunked_prefill_size=5, max_running_requests=4, **EXACT) as llm:
        (expected,) = llm.embed(prompts[1:], "mean")
        tokens = llm.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].token_ids
        stop = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(tokens[3],))
        pooled = SamplingParams(temperature=0, max_tokens=1, pooling="mean")
        first, last = llm.requests(prompts[:1] * 2, stop)
        (middle,) = llm.requests(prompts[1:], pooled)
        requests = [first, middle, last]
        for request in requests:
            llm.scheduler.add(request)
        while llm.scheduler.requests:
            llm.scheduler.step()
        np.testing.assert_allclose(middle.embedding, expected, rtol=1e-6, atol=1e-7)
