"""The real clients against a real server."""

import asyncio

import httpx
import openai
import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def test_models(client, model):
    assert model == "SmolLM2-135M-Instruct"
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_chat(client, model):
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=30)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens > 30
    assert answer.usage.completion_tokens == 8
    again = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=30)
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens >= 32


def test_chat_streaming_says_the_same(client, model):
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=30)
    chunks = list(
        client.chat.completions.create(
            model=model, messages=QUESTION, temperature=0, max_tokens=30, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_many_asynchronous_streams(server, model):
    async def one(client, number):
        stream = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": f"Count from {number}."}], max_tokens=12, stream=True
        )
        return [chunk.choices[0].finish_reason async for chunk in stream][-1]

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, number) for number in range(24)))

    assert set(asyncio.run(run())) <= {"stop", "length"}


def test_completions_of_strings_tokens_and_batches(client, model):
    tokens = httpx.post(f"{client.base_url}".replace("/v1/", "/tokenize"), json={"prompt": "Once upon a time"}).json()
    one = client.completions.create(model=model, prompt="Once upon a time", temperature=0, max_tokens=8)
    same = client.completions.create(model=model, prompt=tokens["tokens"], temperature=0, max_tokens=8, echo=True)
    assert same.choices[0].text == "Once upon a time" + one.choices[0].text
    both = client.completions.create(
        model=model, prompt=["Once upon a time", "The river"], temperature=0, max_tokens=8, n=2
    )
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text == one.choices[0].text
    assert both.usage.completion_tokens == 32


def test_seed_makes_samples_repeatable_and_n_makes_them_differ(client, model):
    def texts():
        answer = client.completions.create(model=model, prompt="My favourite", seed=7, n=3, max_tokens=12)
        return [choice.text for choice in answer.choices]

    assert texts() == texts()
    assert len(set(texts())) == 3


def test_logprobs(client, model):
    chat = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 4
    assert content[0].token == content[0].top_logprobs[0].token
    assert content[0].logprob == content[0].top_logprobs[0].logprob <= 0
    plain = client.completions.create(model=model, prompt="The", temperature=0, max_tokens=3, logprobs=2)
    assert len(plain.choices[0].logprobs.token_logprobs) == 3
    assert all(len(top) == 2 for top in plain.choices[0].logprobs.top_logprobs)


def test_stop_strings_across_tokens(client, model):
    text = client.completions.create(model=model, prompt="1, 2, 3,", temperature=0, max_tokens=30).choices[0].text
    stop = text[7:11]
    for stream in (False, True):
        answer = client.completions.create(
            model=model, prompt="1, 2, 3,", temperature=0, max_tokens=30, stop=["zzz", stop], stream=stream
        )
        got = "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text
        assert got == text[: text.index(stop)]


def test_logit_bias_min_tokens_and_ignored_fields(client, model):
    answer = client.completions.create(
        model="any name", prompt="Hello", max_tokens=3, temperature=0, logit_bias={"2000": 100},
        extra_body={"min_tokens": 3, "no_such_field": {"x": 1}, "top_k": 5},
    )  # fmt: skip
    assert answer.usage.completion_tokens == 3
    assert len(set(answer.choices[0].text.split())) == 1


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"temperature": -1}, "temperature", "between 0 and 100"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"n": 0}, "n", "between 1 and 128"),
        ({"max_tokens": 0}, "max_tokens", "between 1 and"),
        ({"logprobs": 50}, "logprobs", "less than or equal to 20"),
        ({"stop": [""]}, "stop", "non-empty"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 500}}, "logit_bias", "between -100 and 100"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [10**9]}, "prompt", "outside the vocabulary"),
        ({"prompt": [5] * 9000}, "prompt", "maximum context length is 8192"),
        ({"prompt": [5] * 7000}, "prompt", "whole pool holds 6400"),
        ({"prompt": None}, "prompt", "got"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"suffix": "x"}, "suffix", "not supported"),
    ],
)
def test_bad_values_are_refused_by_name(server, body, param, words):
    answer = httpx.post(f"{server}/v1/completions", json={"prompt": "hi", "max_tokens": 2, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


def test_bad_chats_are_refused(server):
    for body, param in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": QUESTION, "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": QUESTION, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "river " * 9000}]}, "messages"),
    ):
        answer = httpx.post(f"{server}/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert httpx.post(f"{server}/v1/chat/completions", content=b"{nonsense").status_code == 400
    assert httpx.get(f"{server}/nowhere").status_code == 404


def test_the_openai_client_raises_its_own_errors(client, model):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=model, messages=QUESTION, temperature=1000)


def test_litellm(server):
    import litellm

    answer = litellm.completion(
        model="openai/SmolLM2-135M-Instruct", api_base=f"{server}/v1", api_key="none", messages=QUESTION,
        temperature=0, max_tokens=30,
    )  # fmt: skip
    assert answer.choices[0].message.content == "The capital of France is Paris."
    parts = litellm.completion(
        model="openai/SmolLM2-135M-Instruct", api_base=f"{server}/v1", api_key="none", messages=QUESTION,
        temperature=0, max_tokens=30, stream=True,
    )  # fmt: skip
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == "The capital of France is Paris."


def test_langchain(server):
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model="SmolLM2-135M-Instruct", base_url=f"{server}/v1", api_key="none", temperature=0, max_completion_tokens=30
    )
    answer = chat.invoke("What is the capital of France? Answer in one sentence.")
    assert answer.content == "The capital of France is Paris."
    assert answer.usage_metadata["input_tokens"] > 30
    assert "".join(part.content for part in chat.stream("What is the capital of France? Answer in one sentence.")) == (
        "The capital of France is Paris."
    )


def test_echo_with_logprobs_scores_the_prompt(client):
    prompt = "The capital of France is"
    answer = client.completions.create(model="m", prompt=prompt, max_tokens=3, temperature=0, logprobs=2, echo=True)
    found = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith(prompt)
    assert "".join(found.tokens) == answer.choices[0].text
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
    stream = client.completions.create(
        model="m", prompt=prompt, max_tokens=3, temperature=0, logprobs=2, echo=True, stream=True
    )
    values = [value for chunk in stream if chunk.choices for value in chunk.choices[0].logprobs.token_logprobs]
    assert values == found.token_logprobs
