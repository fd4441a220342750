"""With integer products and rounded KV, too, what a request says depends on nothing but the request."""

import pytest

from freehold import LLM, SamplingParams

PROMPTS = [
    "The river",
    "In the old town, behind the market and the church, there is a small house with a green door. Its owner",
    "def add(a, b):",
    "Count: one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen",
]
PARAMS = SamplingParams(temperature=0, max_tokens=20, logprobs=2, ignore_eos=True)


def run(prompts, **options):
    with LLM(**{"num_pages": 600, **options}) as llm:
        first = llm.generate(prompts, PARAMS)
        again = llm.generate(prompts, PARAMS)
    for cold, warm in zip(first, again, strict=True):
        assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs), "warm differs from cold"
    return [(output.token_ids, output.logprobs) for output in first]


@pytest.fixture(scope="module")
def alone():
    return [run([prompt], disable_overlap_schedule=True)[0] for prompt in PROMPTS]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [
    {}, {"page_size": 1, "chunked_prefill_size": 5}, {"page_size": 64, "disable_overlap_schedule": True},
    {"chunked_prefill_size": 7, "forward_retract_interval": 3}, {"speculative_algorithm": "ngram"},
])  # fmt: skip
def test_batches_chunks_pages_and_caches_change_nothing(alone, options):
    assert run(PROMPTS, **options) == alone


@pytest.mark.parametrize("option", ["linear_compute", "kv_cache_dtype"])
def test_an_unknown_format_is_refused(option):
    with pytest.raises(ValueError, match=option):
        LLM(**{option: "int3"})
