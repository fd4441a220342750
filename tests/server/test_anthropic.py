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
    assert cut.stop_reason == "stop_sequence"


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
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "f g", "input_schema": {}}]},
        {"tool_choice": {"type": "any"}},
        {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}},
        {"messages": [*QUESTION, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
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


def test_an_assistant_message_at_the_end_is_the_beginning_of_the_answer(client):
    whole = client.messages.create(model="m", max_tokens=24, extra_body=GREEDY, messages=QUESTION).content[0].text
    begun = whole[: len(whole) // 2]
    prefilled = [*QUESTION, {"role": "assistant", "content": begun}]
    rest = client.messages.create(model="m", max_tokens=24, extra_body=GREEDY, messages=prefilled).content[0].text
    counted = client.messages.count_tokens(model="m", messages=prefilled).input_tokens
    assert counted > client.messages.count_tokens(model="m", messages=QUESTION).input_tokens
    assert not rest.startswith(begun[:10])


def test_usage_counts_each_token_of_the_prompt_once(client):
    text = "Something long enough for some pages, which nobody has asked before, and that is worth keeping. " * 4
    marked = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [marked, {"type": "text", "text": "And now?"}]}]
    count = client.messages.count_tokens(model="m", messages=messages).input_tokens
    for is_first in (True, False):
        usage = client.messages.create(model="m", max_tokens=2, extra_body=GREEDY, messages=messages).usage
        parts = (usage.input_tokens, usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0)
        assert sum(parts) == count
        assert (parts[2] < 50) == is_first, "but for the first page, which every chat has"
        assert parts[1] > 0 or not is_first
