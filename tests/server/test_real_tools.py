"""A loop of tools with a model that was trained for them: Qwen2.5-Coder-0.5B, fetched the first time (491 MB)."""

import json

import openai
import pytest

from freehold.bench.fetched_models import QWEN25_CODER_05B
from freehold.server.child import running_server

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": text,
            "parameters": {"type": "object", "properties": properties, "required": [*properties]},
        },
    }
    for name, text, properties in (
        ("get_weather", "Get the current weather of a city.", {"city": {"type": "string"}}),
        ("add", "Add two numbers.", {"a": {"type": "number"}, "b": {"type": "number"}}),
    )
]
ASKED = [
    ("What is the weather in Paris?", "get_weather", {"city": "Paris"}, "21 C, sunny", "21"),
    ("Use the add tool to compute 1234.5 + 17.", "add", {"a": 1234.5, "b": 17}, "1251.5", "1251.5"),
]


@pytest.fixture(scope="module")
def client():
    options = ("--model", str(QWEN25_CODER_05B.path()), "--max-model-len", "2048", "--num-pages", "200")
    with running_server(*options) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        yield client


@pytest.mark.exact
@pytest.mark.parametrize(("question", "name", "arguments", "result", "word"), ASKED)
def test_a_loop_of_tools(client, question, name, arguments, result, word):
    """The model chooses to call, with the right arguments, and says what came of it."""
    options = {"model": client.models.list().data[0].id, "temperature": 0, "max_tokens": 80, "tools": TOOLS}
    messages = [{"role": "user", "content": question}]
    first = client.chat.completions.create(**options, messages=messages).choices[0]
    (call,) = first.message.tool_calls
    assert (first.finish_reason, call.function.name) == ("tool_calls", name)
    assert json.loads(call.function.arguments) == arguments
    messages += [
        first.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": result},
    ]
    last = client.chat.completions.create(**options, messages=messages, tool_choice="none").choices[0]
    assert word in last.message.content
