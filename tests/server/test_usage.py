"""Every route reports the same numbers of tokens, streamed or not, and so do the metrics."""

import json
import re
import uuid
from dataclasses import astuple, dataclass

import httpx
import pytest

PAGE, OUTPUT = 16, 7
METRICS = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
           "request_success_total", "e2e_request_latency_seconds_count",
           "time_to_first_token_seconds_count", "request_queue_time_seconds_count")  # fmt: skip


@dataclass
class Told:
    prompt: int
    cached: int
    output: int


def ask(url: str, path: str, body: dict) -> dict:
    """The answer. Of a stream: its events merged, usage by usage."""
    with httpx.stream("POST", url + path, json=body, timeout=60) as response:
        text = response.read().decode()
    assert response.status_code == 200, text
    if not body["stream"]:
        return json.loads(text)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    found: dict = {}
    for event in events:
        told = event.get("message") or event.get("response") or event
        found = {**found, **told, "usage": {**(found.get("usage") or {}), **(told.get("usage") or {})}}
    return found


def openai_usage(answer: dict) -> Told:
    usage = answer["usage"]
    details = usage["prompt_tokens_details"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert sum(details["cached_tokens_by_tier"].values()) == details["cached_tokens"]
    return Told(usage["prompt_tokens"], details["cached_tokens"], usage["completion_tokens"])


def chat(url: str, text: str, stream: bool) -> Told:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": OUTPUT, "ignore_eos": True}
    return openai_usage(
        ask(url, "/v1/chat/completions", {**body, "stream": stream, "stream_options": {"include_usage": True}})
    )


def completions(url: str, text: str, stream: bool) -> Told:
    body = {"prompt": text, "max_tokens": OUTPUT, "ignore_eos": True, "stream": stream}
    return openai_usage(ask(url, "/v1/completions", {**body, "stream_options": {"include_usage": True}}))


def responses(url: str, text: str, stream: bool) -> Told:
    body = {"input": text, "max_output_tokens": OUTPUT, "ignore_eos": True, "stream": stream}
    usage = ask(url, "/v1/responses", body)["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return Told(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"])


def messages(url: str, text: str, stream: bool) -> Told:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": OUTPUT, "ignore_eos": True}
    answer = ask(url, "/v1/messages", {**body, "stream": stream})
    usage = answer["usage"]
    # This route has no `ignore_eos`: an answer that is shorter has ended by itself, and says so.
    ended = (answer.get("stop_reason") or answer["delta"]["stop_reason"]) == "end_turn"
    assert ended or usage["output_tokens"] == OUTPUT
    cached = usage.get("cache_read_input_tokens", 0)
    return Told(usage["input_tokens"] + cached, cached, usage["output_tokens"])


def generate(url: str, text: str, stream: bool) -> Told:
    body = {"text": text, "sampling_params": {"max_new_tokens": OUTPUT, "ignore_eos": True}, "stream": stream}
    told = ask(url, "/generate", body)["meta_info"]
    return Told(told["prompt_tokens"], told["cached_tokens"], told["completion_tokens"])


def counted(url: str) -> list[float]:
    """Of each metric, the sum over its labels."""
    lines = httpx.get(f"{url}/metrics").text
    return [sum(map(float, re.findall(rf"^vllm:{name}{{.*}} (\S+)$", lines, re.MULTILINE))) for name in METRICS]


@pytest.mark.parametrize("way", [chat, completions, responses, messages, generate])
def test_tokens_are_told_of_as_they_are(url, way):
    text = f"{uuid.uuid4()} " + "tell me of the sea, " * 12
    is_plain = way in (completions, generate)
    sent = {"prompt": text} if is_plain else {"messages": [{"role": "user", "content": text}]}
    count = httpx.post(f"{url}/tokenize", json=sent).json()["count"]
    before = counted(url)
    told = [way(url, text, stream) for stream in (True, False, True)]
    warm = (count - 1) // PAGE * PAGE
    template = 0 if is_plain else min(told[0].cached, PAGE)  # what stands before all messages
    assert [(one.prompt, one.cached) for one in told] == [(count, template), (count, warm), (count, warm)]
    if way is messages:  # whose answers may end by themselves
        assert all(0 < one.output <= OUTPUT for one in told)
    else:
        assert [one.output for one in told] == [OUTPUT] * 3
    prompts, cached, outputs = (sum(part) for part in zip(*map(astuple, told), strict=True))
    now = [after - first for after, first in zip(counted(url), before, strict=True)]
    assert now == [prompts, outputs, prompts, cached, 3, 3, 3, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_each_prompt_counts_once_and_each_output(url, stream):
    texts = [f"{uuid.uuid4()} " + "tell me of the sea, " * times for times in (4, 9)]
    counts = [httpx.post(f"{url}/tokenize", json={"prompt": text}).json()["count"] for text in texts]
    body = {"prompt": texts, "n": 2, "max_tokens": OUTPUT, "ignore_eos": True, "stream": stream}
    body |= {"temperature": 1.0, "stream_options": {"include_usage": True}}
    ask(url, "/v1/completions", body)
    before = counted(url)
    told = openai_usage(ask(url, "/v1/completions", body))
    cached = [(count - 1) // PAGE * PAGE for count in counts]
    assert told == Told(sum(counts), sum(cached), 4 * OUTPUT)
    now = [after - first for after, first in zip(counted(url), before, strict=True)]
    assert now == [2 * sum(counts), 4 * OUTPUT, 2 * sum(counts), 2 * sum(cached), 4, 4, 4, 4]
