"""The Anthropic route with the real client, and its errors."""

import anthropic
import httpx
import pytest


@pytest.fixture(scope="module")
def client(url):
    return anthropic.Anthropic(base_url=url, api_key="none")


GREEDY = {"temperature": 0}
QUESTION = [{"role": "user", "content": "Name three colours of the rainbow, in one line."}]


def test_a_message_equals_the_chat_completion(client, url):
    message = client.messages.create(model="m", max_tokens=20, extra_body=GREEDY, system="Be brief.", messages=QUESTION)
    chat = httpx.post(
        f"{url}/v1/chat/completions",
        json={"messages": [{"role": "system", "content": "Be brief."}, *QUESTION], "max_tokens": 20, "temperature": 0},
        timeout=60,
    ).json()
    assert message.content[0].text == chat["choices"][0]["message"]["content"]
    assert message.stop_reason == ("max_tokens" if chat["choices"][0]["finish_reason"] == "length" else "end_turn")
    cached = chat["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0, "the second request finds the prompt of the first"
    again = client.messages.create(model="m", max_tokens=5, extra_body=GREEDY, system="Be brief.", messages=QUESTION)
    assert again.usage.cache_read_input_tokens == cached
    assert again.usage.input_tokens == chat["usage"]["prompt_tokens"] - cached > 0


def test_a_stream(client):
    whole = client.messages.create(model="m", max_tokens=24, extra_body=GREEDY, messages=QUESTION)
    with client.messages.stream(model="m", max_tokens=24, extra_body=GREEDY, messages=QUESTION) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason


def test_blocks_system_turns_and_stop_sequences(client):
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "Count from one to "}, {"type": "text", "text": "nine."}]}
    ]
    whole = client.messages.create(model="m", max_tokens=30, extra_body=GREEDY, messages=blocks).content[0].text
    stop = whole[5:8]
    cut = client.messages.create(model="m", max_tokens=30, extra_body=GREEDY, messages=blocks, stop_sequences=[stop])
    assert cut.content[0].text == whole[: whole.index(stop)]
    assert cut.stop_sequence == stop
    assert cut.stop_reason == "end_turn"


def test_counting_tokens(client):
    count = client.messages.count_tokens(model="m", messages=QUESTION, system="Be brief.")
    message = client.messages.create(model="m", max_tokens=1, messages=QUESTION, system="Be brief.")
    usage = message.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": 3}]},
        {"tools": [{"name": "f", "input_schema": {}}]},
        {"max_tokens": 10**9, "messages": [{"role": "user", "content": "word " * 9000}]},
    ],
)
def test_errors_have_anthropics_shape(url, change):
    body = {"model": "m", "max_tokens": 5, "messages": QUESTION, **change}
    answer = httpx.post(f"{url}/v1/messages", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["message"]
