"""The Python API, offline and asyncio."""

import asyncio

import pytest

from freehold import LLM, AsyncEngine, InvalidParameter, SamplingParams


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint=checkpoint, num_pages=200, max_running_requests=8, audit_interval=1) as llm:
        yield llm


def test_prompts_are_strings_or_tokens_and_answers_come_in_order(llm):
    params = SamplingParams(temperature=0, max_tokens=5)
    progress = []
    tokens = llm.tokenizer.encode("The river").tolist()
    outputs = llm.generate(["Once upon", tokens, "The river"], params, progress.append)
    assert outputs[1].token_ids == outputs[2].token_ids
    assert outputs[0].token_ids != outputs[1].token_ids
    assert progress[-1] == 3
    assert [llm.generate(prompt, params)[0].text for prompt in ("The river", tokens)] == [outputs[1].text] * 2


def test_each_prompt_may_have_its_own_parameters_and_several_samples(llm):
    several = SamplingParams(n=3, seed=1, max_tokens=6)
    single = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate([list(range(50, 90)), "b"], [several, single])
    assert len(outputs) == 4
    assert len({tuple(output.token_ids) for output in outputs[:3]}) == 3
    assert [output.cached_tokens for output in outputs[:3]] == [0, 32, 32], "they share the prompt's pages"
    assert len(outputs[3].token_ids) == 2
    with pytest.raises(ValueError, match="1 given for 2 prompts"):
        llm.generate(["a", "b"], [single])


def test_stop_and_eos(llm):
    text = llm.tokenizer.chat_template.render([{"role": "user", "content": "What is the capital of France?"}])
    (output,) = llm.generate([text], SamplingParams(temperature=0, max_tokens=30))
    assert (output.text, output.finish_reason, output.matched) == ("The capital of France is Paris.", "stop", 2)
    assert output.token_ids[-1] == 2
    (cut,) = llm.generate([text], SamplingParams(temperature=0, max_tokens=30, stop="of Fr"))
    assert (cut.text, cut.finish_reason, cut.matched) == ("The capital ", "stop", "of Fr")
    (on,) = llm.generate([text], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert (len(on.token_ids), on.finish_reason) == (12, "length")
    (late,) = llm.generate([text], SamplingParams(temperature=0, max_tokens=30, min_tokens=15))
    assert len(late.token_ids) >= 15


def test_what_can_never_fit_is_refused_before_anything_runs(llm):
    with pytest.raises(ValueError, match="whole pool holds 3200"):
        llm.generate(["fine", [5] * 4000])
    with pytest.raises(InvalidParameter, match="outside the vocabulary"):
        llm.generate([[10**7]])
    assert not llm.scheduler.has_work


def test_a_stream_left_early_gives_everything_back(llm):
    llm.scheduler.memory.flush()
    for piece in llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)):
        assert isinstance(piece, str)
        break
    llm.scheduler.memory.flush()
    llm.scheduler.audit()
    assert llm.page_counts.free == 200


def test_async_engine():
    async def run():
        engine = AsyncEngine(num_pages=100)
        await engine.start()
        try:
            prompt = engine.tokenizer.encode("Once upon a time")
            params = SamplingParams(temperature=0, max_tokens=6)
            deltas = [delta async for delta in engine.stream([prompt, prompt], params)]
            texts = ["".join(delta.text for delta in deltas if delta.index == i) for i in (0, 1)]
            assert texts[0] == texts[1] != ""
            assert [delta.ended.output_tokens for delta in deltas if delta.ended] == [6, 6]
            with pytest.raises(InvalidParameter, match="whole pool"):
                async for _ in engine.stream([engine.tokenizer.encode("a " * 2000)], params):
                    pass
            report = await engine.call("memory")
            assert report["leases"] == []
        finally:
            await engine.shutdown()

    asyncio.run(run())


def test_two_streams_at_once_do_not_mix(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = ["Once upon a time", "The river runs"]
    expected = [output.text for output in llm.generate(prompts, params)]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    texts, done = ["", ""], [False, False]
    while not all(done):
        for i, stream in enumerate(streams):
            piece = next(stream, None)
            done[i] = piece is None
            texts[i] += piece if isinstance(piece, str) else ""
    assert texts == expected


def test_generate_beside_an_open_stream_leaves_it_alone(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (expected,) = llm.generate("Once upon a time", params)
    stream = llm.stream("Once upon a time", params)
    text = next(stream)
    assert len(llm.generate(["The river", "Two"], params)) == 2
    assert text + "".join(piece for piece in stream if isinstance(piece, str)) == expected.text
    left_early = llm.stream("Something else", params)
    other = llm.stream("Once upon a time", params)
    next(left_early)
    first = next(other)
    left_early.close()
    assert first + "".join(piece for piece in other if isinstance(piece, str)) == expected.text
    assert llm.page_counts.lease == 0
