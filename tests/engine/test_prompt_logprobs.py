"""Log-probabilities of prompts are those that decoding had, however the prompt is computed."""

import numpy as np
import pytest

from freehold import LLM, SamplingParams

TEXT = "The river runs through the valley, and the old mill beside it"


def scored(start, k=3, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=2, logprobs=k, prompt_logprobs_start=start, **options)


@pytest.fixture(scope="module")
def decoded():
    """A prompt, what the model said after it, and how sure it was."""
    with LLM(num_pages=400) as llm:
        prompt = llm.tokenizer.encode(TEXT).tolist()
        params = SamplingParams(temperature=0, max_tokens=40, logprobs=3, logprob_token_ids=(7, 500), ignore_eos=True)
        (output,) = llm.generate([prompt], params)
        assert output.logprobs is not None
        return prompt, output.token_ids, output.logprobs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [
    {}, {"chunked_prefill_size": 7}, {"page_size": 4, "chunked_prefill_size": 16}, {"page_size": 64},
    {"disable_overlap_schedule": True, "chunked_prefill_size": 5, "page_size": 1},
    {"speculative_algorithm": "ngram"},
])  # fmt: skip
def test_a_prompt_scores_what_decoding_scored(decoded, options):
    prompt, output, logprobs = decoded
    whole = [*prompt, *output]
    with LLM(**{"num_pages": 800, **options}) as llm:
        for start in (0, len(prompt) - 1, len(prompt) + 20):
            (cold,) = llm.generate([whole], scored(start, logprob_token_ids=(7, 500)))
            (warm,) = llm.generate([whole], scored(start, logprob_token_ids=(7, 500)))
            assert warm.prompt_logprobs == cold.prompt_logprobs
            assert warm.cached_tokens <= start, "what is scored must be computed"
            assert cold.prompt_logprobs is not None
            assert [one.token for one in cold.prompt_logprobs] == whole[start + 1 :]
            known = max(start + 1 - len(prompt), 0)
            assert cold.prompt_logprobs[max(len(prompt) - 1 - start, 0) :] == logprobs[known:]
        (last,) = llm.generate([whole], scored(len(whole) - 1))
        assert last.prompt_logprobs == []
        assert last.cached_tokens >= len(whole) - 64


def test_scores_survive_retraction(decoded):
    prompt, output, _ = decoded
    whole = [*prompt, *output]
    with LLM(num_pages=400) as llm:
        (alone,) = llm.generate([whole], scored(0))
    with LLM(num_pages=40, page_size=4, chunked_prefill_size=9, forward_retract_interval=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=3, prompt_logprobs_start=0, ignore_eos=True)
        outputs = llm.generate([whole, whole[3:], whole], params)
        assert sum(one.retractions for one in outputs)
        assert outputs[0].prompt_logprobs == outputs[2].prompt_logprobs == alone.prompt_logprobs


def test_a_distribution_adds_up(decoded):
    prompt, _, _ = decoded
    with LLM(num_pages=400) as llm:
        everything = tuple(range(1024))
        params = SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs_start=0, logprob_token_ids=everything)
        (output,) = llm.generate([prompt], params)
        assert output.prompt_logprobs is not None
        for one in output.prompt_logprobs:
            assert [token for token, _ in one.asked] == list(everything)
            assert 0 < np.exp([value for _, value in one.asked]).sum() < 1
