"""Output tokens equal those of transformers in float32, and those of a cold run, in every configuration."""

from dataclasses import replace

import numpy as np
import pytest
from exactness import (
    Mode,
    Precision,
    assert_transformers_agrees,
    full_matrix,
    greedy,
    make_prompts,
    pairwise_cover,
)

from freehold import LLM, SamplingParams
from freehold.models.loading.truncated import TruncatedCheckpoint

SHORT = [1, 2, 15, 16, 17, 33, 64, 130]
MIDDLE = [1, 5, 100, 320, 640]
LONG = [1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 128, 130, 150, 200, 222, 256, 257, 300, 333, 400, 450, 512,
        513, 600, 700, 800, 900, 1000, 1200, 1500, 1800, 2000]  # fmt: skip


def cold(checkpoint, text, lengths, params, precision=Precision.EXACT):
    """-> (prompts, outputs) of the plainest configuration: no cache, no overlap, one at a time."""
    llm = LLM(
        checkpoint=checkpoint,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        max_running_requests=1,
        chunked_prefill_size=4096,
        **precision.options,
    )
    with llm:
        prompts = make_prompts(llm, text, lengths)
        return prompts, [llm.generate([prompt], params)[0].token_ids for prompt in prompts]


# A few layers alone would say one word over and over, in which no mistake shows.
VARIED = replace(greedy(24), repetition_penalty=1.3)


def short_runs(checkpoint, text, params):
    return {precision: cold(checkpoint, text, SHORT, params, precision) for precision in Precision}


@pytest.fixture(scope="module")
def few_layers(checkpoint):
    """The same model, cut: a fifth of the time, and wrong KV shows as it does in the whole."""
    return TruncatedCheckpoint(checkpoint, 6)


@pytest.fixture(scope="module")
def few_layers_runs(few_layers, license_text):
    runs = short_runs(few_layers, license_text, VARIED)
    for _, outputs in runs.values():
        assert len({token for output in outputs for token in output}) > 20, "too few tokens to tell runs apart"
    return runs


@pytest.mark.thorough
def test_tokens_equal_those_of_transformers(checkpoint, license_text, transformers_model):
    prompts, outputs = cold(checkpoint, license_text, MIDDLE, greedy(32))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == 32
        assert_transformers_agrees(transformers_model, prompt, output)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("cell", pairwise_cover(), ids=str)
def test_every_pair_of_features_gives_cold_tokens(cell, few_layers, few_layers_runs):
    prompts, expected = few_layers_runs[cell.precision]
    assert cell.run(few_layers, prompts, VARIED) == expected


@pytest.mark.exact
@pytest.mark.timeout(3600)
def test_full_matrix_gives_cold_tokens(checkpoint, license_text, transformers_model):
    prompts, expected = cold(checkpoint, license_text, LONG, greedy())
    short = short_runs(checkpoint, license_text, greedy(24))
    for prompt, output in zip(prompts, expected, strict=True):
        assert_transformers_agrees(transformers_model, prompt, output)
    for cell in full_matrix():
        short_prompts, short_expected = short[cell.precision]
        is_long = cell.mode is Mode.WARM_BATCH and cell.chunk == 512 and cell.overlap
        if is_long and cell.precision is Precision.EXACT:
            assert cell.run(checkpoint, prompts, greedy()) == expected, cell
        else:
            assert cell.run(checkpoint, short_prompts, greedy(24)) == short_expected, cell
        print(f"{cell}: equal", flush=True)


def test_seeded_sampling_does_not_depend_on_the_batch(checkpoint):
    def params(seed):
        return SamplingParams(
            temperature=0.9, top_p=0.95, top_k=50, seed=seed, max_tokens=20, repetition_penalty=1.1, logprobs=2
        )

    prompts = ["The river", "A library is", "In the year 1900", "def main():"]
    with LLM(checkpoint=checkpoint, audit_interval=1, forward_retract_interval=7, max_running_requests=8) as llm:
        together = llm.generate(prompts * 2, [params(i % 4) for i in range(8)])
    with LLM(checkpoint=checkpoint, disable_overlap_schedule=True, page_size=4) as llm:
        alone = [llm.generate([prompt], params(i))[0] for i, prompt in enumerate(prompts)]
    for i, output in enumerate(together):
        assert output.token_ids == alone[i % 4].token_ids
        assert output.logprobs == alone[i % 4].logprobs
        assert np.isfinite([entry.logprob for entry in output.logprobs or []]).all()
